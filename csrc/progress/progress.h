// The progress thread and the queue of operations that it runs by priority.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/backoff.h"
#include "base/telemetry.h"
#include "progress/operation.h"
#include "transport/mpi_error.h"

namespace hvpipe {

// The error of a call that comes after Stop.
Error ShutDown();

// Runs operations: most urgent first (in shared memory in the order of arrival), on one thread of its own or
// on a caller's thread inside Run.
//
// Threads: every public function may be called from any thread. One thread at a time drives, i.e. steps
// operations; it holds drive_mutex_. inbox_mutex_ guards the hand-over from callers to the driver. A thread
// that takes both takes drive_mutex_ first. `finished` callbacks run without either lock.
class Progress {
 public:
  struct Options {
    double timeout_s = 300;
    double first_steps_timeout_s = 0;  // until EndFirstSteps, if that is longer
    double stall_s = 0;                // call `stalled` after a wait of this length; 0: never
    // Sleep time in seconds after this many consecutive passes without progress. 0: yield the core instead.
    // The second number: seconds since the last progress.
    std::function<double(int, double)> nap_s = [](int, double) { return 50e-6; };
    int spins = 0;  // passes without progress that a caller repeats at once, at most
    // Called at the beginning of a pass; returns whether anything has happened.
    std::function<bool(double now_s)> begin_pass = [](double) { return false; };
    // The longest time between two passes, in seconds, even if no operation is under way.
    std::function<double()> most_nap_s = [] { return std::numeric_limits<double>::infinity(); };
    // Called once when nothing has moved for `stall_s` seconds, on the driving thread.
    std::function<void(const Stall&)> stalled = [](const Stall&) {};
    // What to add to the message of a deadline.
    std::function<std::string()> report = [] { return std::string(); };
    // Called after the engine has failed, without any lock held, after `finished` of every operation that
    // failed.
    std::function<void()> failed = [] {};
  };

  Progress(Options options, Telemetry& telemetry);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Enqueue operations in this order. If not `ready`, they wait for MakeReady. Throws the first error if the
  // engine has failed. Later errors go to each operation's `finished`.
  void Enqueue(const std::vector<std::shared_ptr<Operation>>& operations, bool ready);
  void MakeReady(const std::shared_ptr<Operation>& operation);
  // Let the thread make a pass. From then on it obeys Options::most_nap_s.
  void Wake();

  // Enqueue `operation`, ready, and drive all communication on the calling thread until it is done, for at
  // most `most_s` seconds; 0: one pass. The thread does the rest. Does nothing here if another thread drives.
  void Begin(const std::shared_ptr<Operation>& operation, double most_s);

  // Enqueue `operation` and drive all communication on the calling thread until it is done. This saves the
  // hand-over to the progress thread. `interrupt` is called some 20 times a second and may throw.
  void Run(const std::shared_ptr<Operation>& operation, const Interrupt& interrupt);

  // Run an operation of one stage. If nothing else is under way and all peers are present, only `make` is
  // called and the collective ends within microseconds; creating, queueing and ending an operation would take
  // as long again. Otherwise `operation` is called and enqueued as in Run. `over_network`: the collective
  // needs Options::begin_pass between its steps.
  void RunBrief(const std::function<std::unique_ptr<Collective>(std::uint64_t sequence)>& make,
                const std::function<std::shared_ptr<Operation>()>& operation, const Interrupt& interrupt,
                bool over_network);

  // Make one pass on the calling thread, unless another thread drives. A sender's message then reaches the
  // network before the sender computes on, instead of waiting until the progress thread gets a core.
  void StepOnce();
  // Call `what` while no thread drives.
  void WhileNobodyDrives(const std::function<void()>& what);

  // From now on only the usual limit counts. Any thread may call.
  void EndFirstSteps() { first_steps_ = false; }
  // How long an operation may wait without progress, in seconds.
  double limit_s() const {
    return first_steps_ ? std::max(options_.timeout_s, options_.first_steps_timeout_s) : options_.timeout_s;
  }

  // End every operation with `error`, present and future ones.
  void Fail(const Error& error);
  std::optional<Error> error() const;
  // What this rank waits for; empty if for nothing, or if that cannot be found out now.
  std::optional<Stall> WaitsNow();
  // The error that a new request gets: shut down, or the first error. Empty while the engine works.
  std::optional<Error> refusal() const;

  // Begin to shut down: `refusal` says so from now on. Returns false if it was called before.
  bool Close() { return !closed_.exchange(true); }
  // Wait until no ready operation is under way, the engine has failed, or `patience_s` seconds have passed.
  void Drain(double patience_s);
  // End the thread. Operations still under way fail.
  void Stop();

 private:
  struct PassResult {
    bool moved = false;
    bool waiting = false;  // at least one ready operation has not ended
    double nap_s = 0;      // before the next pass, if nothing moved
    double most_nap_s = std::numeric_limits<double>::infinity();  // its limit
    bool watches = false;  // passes are needed although nothing is under way
  };
  struct Finished {
    std::shared_ptr<Operation> operation;
    std::optional<Error> error;
  };

  // How an operation that a caller drives has ended. Shared, because an interrupted caller may leave before
  // another thread reports the outcome.
  struct Outcome {
    std::optional<Error> error;
    std::atomic<bool> ended{false};
  };

  void Loop();
  static std::shared_ptr<Outcome> Watch(Operation& operation);
  void CheckOpen() const;
  void Drive(const Operation& operation, const Outcome& outcome, std::unique_lock<std::mutex> drive,
             const Interrupt& interrupt);
  void Adopt(const std::shared_ptr<Operation>& operation, std::unique_ptr<Collective>& collective,
             std::uint64_t sequence);
  void EnterInline();
  void LeaveInline(bool work_remains);
  bool TakeInbox();
  PassResult Pass();
  bool StepOne(Operation& operation, double now);
  bool Blocked(const Operation& operation) const;
  void ForgiveStop(double now);
  void AwaitNames(const Error& error);
  PassResult AwaitNames(double now);
  // progress_waits.cc
  void CheckDeadline(const Operation& operation, double waited_s) const;
  void TellStall(double now);
  std::optional<Stall> StallOf(double now) const;
  void EndStage(Operation& operation);
  void FailAll(const Error& error);
  void RunFinished();

  const Options options_;
  Counters& counters_;
  EventLog& log_;
  FlightRecorder& flight_;

  std::atomic<bool> closed_{false};
  std::atomic<bool> first_steps_{true};

  // Guards the state that callers and the driver share.
  mutable std::mutex inbox_mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Operation>> inbox_;
  std::vector<std::shared_ptr<Operation>> newly_ready_;
  bool stop_ = false;
  bool woken_ = false;
  int inline_drivers_ = 0;
  std::uint64_t next_sequence_ = 0;
  std::optional<Error> error_;

  // Held by the driver, which is the thread or a caller in Run. Guards the state of the driver.
  std::mutex drive_mutex_;
  std::vector<std::shared_ptr<Operation>> active_;  // by priority, then by sequence
  // Kept: MPI requests in flight still use their buffers.
  std::vector<std::shared_ptr<Operation>> failed_;
  std::vector<std::unique_ptr<Collective>> left_;  // of RunBrief
  std::vector<Finished> finished_;
  SpinLimit spins_, brief_spins_;
  bool failing_ = false;       // options_.failed must be called
  std::optional<Error> lost_;  // of a lost rank: the engine fails with it unless Fail comes first
  double lost_s_ = 0;          // when that was
  double next_deadline_check_s_ = 0;
  int idle_passes_ = 0;
  double moved_s_ = 0;
  double passed_s_ = 0;  // when the last pass ended, if it left operations that wait; else 0
  double stall_told_s_ = 0;

  std::thread thread_;
};

}  // namespace hvpipe
