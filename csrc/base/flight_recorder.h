// The flight recorder: the last events of this rank, in a file that outlives the process however it ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/event_log.h"

namespace hvpipe {

// hvpipe/blackbox/files.py reads these numbers.
enum class Flight : std::uint32_t {
  kReady = 1,   // an operation may run on this rank
  kBegun = 2,   // its first bytes moved
  kDone = 3,    // it ended
  kStep = 4,    // a training step was announced
  kPacked = 5,  // a bucket's gradients are in its buffer
  kWaits = 6,   // training waits for the sum of a bucket
  kStalled = 7,
  kFailed = 8,
  kNote = 9,
};

// A ring of events in memory. With a path, the memory is a mapped file: the kernel keeps what was written,
// also after SIGKILL. Only a crash of the host loses it. Close removes the file, so a file that is left tells
// of a rank that did not end properly.
//
// Threads: any thread may add. A reader sees events that are whole, because each has its number before and
// after.
class FlightRecorder {
 public:
  static constexpr std::size_t kEvents = 1000;
  static constexpr double kFrozenS = 2;
  static constexpr double kHandledS =
      60;  // a rank that lives on after SIGTERM for so long was not ended by it

  // "": in memory only. Throws an Error if the file cannot be made.
  explicit FlightRecorder(const std::string& path);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  void SetRank(int rank, int size);
  // `sequence`: of the operation, or the step. A step is counted at once, because the process may end now.
  void Add(Flight kind, std::string_view what, std::uint64_t sequence, double at_s = Now());
  // Whether to record from now on.
  void Record(bool on) { records_.store(on, std::memory_order_relaxed); }
  // This rank still runs. Called several times a second.
  void Beat(std::uint64_t operations);
  // Why this rank ends. The first call counts.
  void End(std::string_view why);
  // This rank ends properly.
  void Close();

  // Let SIGTERM, signals of a crash, and others that nobody handles leave their number in the file. Then they
  // act as before. Call it again after another handler was installed.
  void MarkSignals();

 private:
  struct Event {
    std::atomic<std::uint64_t> number;  // from 1; 0 while the event is written
    double at_s;
    std::uint64_t sequence;
    std::uint32_t kind;
    char what[100];
  };
  struct Header {
    char magic[8];
    std::uint32_t version, events, event_bytes;
    std::int32_t rank, size, pid;
    double unix_s;  // Unix time minus Now()
    double began_s, beat_s, ended_s;
    double frozen_s, thawed_s;  // the last time that this process did not run for kFrozenS
    std::atomic<std::uint64_t> next;
    std::atomic<std::uint64_t> steps;
    std::uint64_t operations;
    std::int32_t signal;
    std::atomic<std::uint32_t> ending;
    char host[64];
    char why[2048];
  };
  struct File {
    Header header;
    char gap[4096 - sizeof(Header)];
    Event events[kEvents];
  };
  static_assert(sizeof(Event) == 128 && sizeof(File) == 4096 + kEvents * 128);

  static void OnSignal(int number);
  void NoticeFreeze(double now);

  std::string path_;
  std::atomic<bool> records_{true};
  File* file_;
};

}  // namespace hvpipe
