// The watchdog: signs of life, reports of collectives that wait too long, and what ranks tell of their work.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/telemetry.h"
#include "progress/operation.h"
#include "transport/text_messages.h"

namespace hvpipe {

// A thread that needs neither the interpreter lock nor the progress thread, so it answers whatever the rest
// of the process does.
//
// While it waits, it also looks for ranks of its host whose process has ended. A launcher that ends the
// others does so sooner, but srun without -K lets them wait.
//
// A rank that waits too long tells rank 0, or the next rank if rank 0 does not acknowledge. That rank
// collects for half a second who waits, then asks the ranks that these need what they do, and prints one
// report:
//
//   rank 1, which waits        rank 0, which collects        rank 2, which is late
//          kStalled  ----------------->
//          <-----------------  kAcknowledged
//                                       kAsk  ----------------->
//                                       <-----------------  kAnswer: its Python stack
//
// Threads: any thread may call. mutex_ guards what they share with the watchdog's thread.
class Watchdog {
 public:
  // What this rank waits for now; empty if it computes.
  using WaitsNow = std::function<std::optional<Stall>()>;
  // Gets an error that names a rank whose process has ended while this rank waits.
  using Lost = std::function<void(const Error& error)>;

  Watchdog(TextMessages& texts, Telemetry& telemetry, WaitsNow waits_now, Lost lost);
  ~Watchdog() { Stop(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // This rank has waited too long.
  void Report(const Stall& stall);
  // `signal`, sent to a thread of this process, writes the stacks of all Python threads to `file`.
  void UseStacks(int signal, int file);
  // Tell rank 0 how this rank does, at the next sign of life. Until then, a newer text replaces it.
  void TellRank0(std::string status);
  // What ranks have told this one since the last call: the newest text of each.
  std::vector<std::string> TakeStatuses();
  // Whether to give signs of life and to report from now on.
  void Watch(bool on);
  // The last report that this rank printed.
  std::string report() const;
  void Stop();

 private:
  void Loop();
  void Step(double now);
  void LookForLost(double now);
  void TakeStall(double now);
  void SendStatus();
  void Take(const TextMessage& message, double now);
  void Collect(int rank, const Stall& stall, double now);
  std::map<int, Stall> Waiting() const;
  bool AskNeeded();
  void Finish();
  std::string Answer();
  std::string Stacks();
  std::string ReportText();
  std::string SilentRank(int rank) const;

  TextMessages& texts_;
  Telemetry& telemetry_;
  const WaitsNow waits_now_;
  const Lost lost_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false, watches_ = true;
  std::optional<Stall> reported_;
  int stack_signal_ = 0, stack_file_ = -1;
  std::string report_;
  std::optional<std::string> status_;    // not sent yet
  std::map<int, std::string> statuses_;  // not taken yet, by rank

  // Of the watchdog's thread.
  std::optional<Stall> own_;  // not acknowledged yet
  int told_ = 0;              // the rank that collects
  int sent_to_ = -1;          // the rank that own_ was sent to
  double told_s_ = 0;
  std::map<int, Stall> stalled_;         // collected here, by rank
  std::map<int, std::string> answers_;   // by rank
  double collects_s_ = 0, asked_s_ = 0;  // since when; 0: not
  double looked_s_ = 0;                  // for lost ranks; infinite once one is found
  std::map<int, double> reported_s_;     // by rank: when a report last said that it waits
  std::thread thread_;
};

}  // namespace hvpipe
