// The one thread that moves communication forward, and the queue of operations that it serves by priority.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/check.h"
#include "collectives/collective.h"
#include "core/event_log.h"

namespace hvpipe {

class Operation;

// Of a call that comes after the end.
Error ShutDown();

// Operations that share a resource take it in the order in which they were enqueued, the same on all ranks.
using OrderQueue = std::deque<Operation*>;

// A piece of communication: one or more collectives, one after the other.
class Operation {
 public:
  struct Stage {
    // Made when the stage begins, since its buffers may not exist before.
    std::function<std::unique_ptr<Collective>(const Operation&)> make;
    OrderQueue* order = nullptr;
    std::unique_ptr<Collective> collective;
  };

  std::string what;              // in words, for messages and the trace
  int priority = 0;              // lower goes first
  const char* traced = nullptr;  // the category of its time under way in the trace, if it is to be there
  bool of_all_ranks = true;      // each rank enqueues it; then its sequence number is the same on all
  bool patient = false;          // waited for however long: a rank may still be at work of its own
  std::vector<Stage> stages;
  // Runs on the driving thread when the last stage is done; what it throws fails the engine.
  std::function<void(Operation&)> check;
  // Runs once, without any lock held: null, or what went wrong.
  std::function<void(const Error*)> finished;

  std::uint64_t sequence() const { return sequence_; }

 private:
  friend class Progress;
  std::uint64_t sequence_ = 0;
  std::size_t current_ = 0;
  bool seen_ready_ = false;
  bool ended_ = false;
  double ready_s_ = 0, started_s_ = 0, moved_s_ = 0;
};

class Progress {
 public:
  struct Options {
    double timeout_s = 300;
    // How long to sleep after so many passes in a row in which nothing moved.
    std::function<double(int)> nap_s = [](int) { return 50e-6; };
    bool crowded = false;  // more ranks on this host than cores
    std::function<void(double now_s)> begin_pass = [](double) {};
    // Called with every error that ends all, without any lock held, behind `finished` of what it ended.
    std::function<void()> failed = [] {};
  };

  Progress(Options options, Counters& counters, EventLog& log);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Enqueues operations in this order; those that are not `ready` wait for MakeReady. Throws the first
  // error if the engine has failed; what fails later, each operation's `finished` is told.
  void Enqueue(const std::vector<std::shared_ptr<Operation>>& operations, bool ready);
  void MakeReady(const std::shared_ptr<Operation>& operation);

  // Enqueues `operation` and drives all communication on the calling thread until it is done, which saves
  // the hand-over to the progress thread. `interrupt` is called some times a second and may throw.
  void Run(const std::shared_ptr<Operation>& operation, const std::function<void()>& interrupt);

  // The same of an operation of one stage, `make` being that stage's. Where nothing else is under way and the
  // peers are there, it is over within microseconds, and `operation` is not called: half of these
  // microseconds would go into making, queueing and ending it.
  void RunBrief(const std::function<std::unique_ptr<Collective>(std::uint64_t sequence)>& make,
                const std::function<std::shared_ptr<Operation>()>& operation,
                const std::function<void()>& interrupt);

  // Moves on what can be, on this thread, unless another is about to: so a message is with the network before
  // its maker goes on to compute, and has not to wait for the progress thread's turn on a core.
  void StepOnce();
  // Calls `what` while nobody drives.
  void Alone(const std::function<void()>& what);

  // Ends every operation with `error`, now and from now on.
  void Fail(const Error& error);
  std::optional<Error> error() const;

  // Waits until nothing that is ready is under way, all has failed, or `patience_s` is over.
  void Drain(double patience_s);
  // Ends the thread. What is still under way is failed.
  void Stop();

 private:
  struct PassResult {
    bool moved = false;
    bool waiting = false;  // something could be stepped and did not end
    double nap_s = 0;
  };
  struct Finished {
    std::shared_ptr<Operation> operation;
    std::optional<Error> error;
  };

  // How an operation that a caller drives ended. Shared: an interrupted caller may leave while another thread
  // is about to tell.
  struct Outcome {
    std::optional<Error> error;
    std::atomic<bool> ended{false};
  };

  void Loop();
  static std::shared_ptr<Outcome> Watch(Operation& operation);
  void CheckOpen() const;
  void Drive(const Operation& operation, const Outcome& outcome, std::unique_lock<std::mutex> drive,
             const std::function<void()>& interrupt);
  void LeaveInline(bool work_remains);
  void TakeInbox();
  PassResult Pass();
  bool StepOne(Operation& operation, double now);
  bool Blocked(Operation& operation) const;
  void CheckDeadline(const Operation& operation, double waited_s) const;
  void EndStage(Operation& operation);
  void FailAll(const Error& error);
  void RunFinished();

  const Options options_;
  Counters& counters_;
  EventLog& log_;

  // Guards what callers and the driver share.
  mutable std::mutex inbox_mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Operation>> inbox_;
  std::vector<std::shared_ptr<Operation>> newly_ready_;
  bool stop_ = false;
  bool woken_ = false;
  int inline_drivers_ = 0;
  std::uint64_t next_sequence_ = 0;
  std::optional<Error> error_;

  // Guards what the driver alone touches, which may be the thread or a caller in Run.
  std::mutex drive_mutex_;
  std::vector<std::shared_ptr<Operation>> active_;  // by priority, then by sequence
  std::vector<std::shared_ptr<Operation>> failed_;  // kept: requests in flight still name their buffers
  std::vector<Finished> finished_;
  bool failing_ = false;  // options_.failed is to be called
  double next_deadline_check_s_ = 0;
  int idle_passes_ = 0;
  double moved_s_ = 0;

  std::thread thread_;
};

}  // namespace hvpipe
