// The progress loop: steps operations, sleeps when none makes progress, fails the engine when a deadline
// passes.
#include "progress/progress.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace hvpipe {
namespace {

constexpr double kDeadlineCheckS = 0.1;
constexpr int kBriefSpins = 1000;  // looks at the peers, some 30 ns each in shared memory
// The thread naps for milliseconds. If it was away for longer than this, the process had been stopped.
constexpr double kStoppedS = 2;
// MPI says that a rank was lost. Whoever watches for lost ranks names them moments later, by Fail.
constexpr double kNamesLostS = 2;
constexpr double kNamesNapS = 1e-3;

// Ask Linux (6.12 and later) for short time slices. In exchange the thread need not wait for the end of a
// computing thread's long slice each time it wakes. If Linux refuses, the thread only wakes later.
void AskForShortTurns() {
  struct {  // struct sched_attr, version 0
    std::uint32_t size = 48, policy = SCHED_OTHER;
    std::uint64_t flags = 0;
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime_ns = 100'000, deadline_ns = 0, period_ns = 0;
  } attributes;
  attributes.nice = getpriority(PRIO_PROCESS, 0);
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

Progress::Progress(Options options, Telemetry& telemetry)
    : options_(std::move(options)),
      counters_(telemetry.counters),
      log_(telemetry.log),
      flight_(telemetry.flight),
      spins_(options_.spins),
      brief_spins_(std::min(options_.spins, kBriefSpins)),
      thread_([this] { Loop(); }) {}

Progress::~Progress() { Stop(); }

Error ShutDown() {
  return Error("The engine has been shut down; call hvpipe.init() first.", ErrorKind::kUsage);
}

void Progress::Enqueue(const std::vector<std::shared_ptr<Operation>>& operations, bool ready) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    CheckOpen();
    for (const auto& operation : operations) {
      operation->sequence_ = operation->of_all_ranks ? next_sequence_++ : next_sequence_;
      inbox_.push_back(operation);
      if (ready) newly_ready_.push_back(operation);
    }
    woken_ = woken_ || ready;
  }
  if (ready) wake_.notify_all();
}

void Progress::MakeReady(const std::shared_ptr<Operation>& operation) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    if (error_) return;
    newly_ready_.push_back(operation);
    woken_ = true;
  }
  wake_.notify_all();
}

void Progress::Wake() {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    woken_ = true;
  }
  wake_.notify_all();
}

// Requires inbox_mutex_.
void Progress::CheckOpen() const {
  if (error_) throw *error_;
  if (stop_) throw ShutDown();
}

void Progress::StepOnce() {
  {
    const std::unique_lock<std::mutex> drive(drive_mutex_, std::try_to_lock);
    if (!drive) return;
    (void)Pass();
  }
  RunFinished();
}

void Progress::WhileNobodyDrives(const std::function<void()>& what) {
  const std::lock_guard<std::mutex> drive(drive_mutex_);
  what();
}

void Progress::Fail(const Error& error) {
  {
    const std::lock_guard<std::mutex> drive(drive_mutex_);
    FailAll(error);
  }
  RunFinished();
}

std::optional<Error> Progress::error() const {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  return error_;
}

std::optional<Error> Progress::refusal() const {
  return closed_ ? std::optional<Error>(ShutDown()) : error();
}

void Progress::Drain(double patience_s) {
  const double deadline_s = Now() + patience_s;
  for (;;) {
    {
      const std::lock_guard<std::mutex> drive(drive_mutex_);
      TakeInbox();
      const bool busy = std::any_of(active_.begin(), active_.end(),
                                    [](const auto& operation) { return operation->seen_ready_; });
      if (!busy || error() || Now() > deadline_s) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Progress::Stop() {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Progress::Loop() {
  // By default Linux may fire timers 50 us late, which would double every sleep below.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  prctl(PR_SET_NAME, "hvpipe progress", 0UL, 0UL, 0UL);  // for debuggers and monitor/utilization.py
  AskForShortTurns();
  PassResult result;
  for (;;) {
    bool yields = false;
    {
      std::unique_lock<std::mutex> lock(inbox_mutex_);
      const auto has_work = [&] { return stop_ || (woken_ && inline_drivers_ == 0); };
      // After progress make another pass before sleeping: an operation that was blocked may now be able to
      // run.
      if (inline_drivers_ > 0 && result.watches) {  // nobody tells when the last caller has ended
        wake_.wait_for(lock, std::chrono::duration<double>(result.most_nap_s), has_work);
      } else if (inline_drivers_ > 0 || (!result.waiting && !result.moved)) {
        wake_.wait(lock, has_work);
      } else if (!result.moved && result.nap_s > 0) {
        ++counters_.sleeps;
        wake_.wait_for(lock, std::chrono::duration<double>(result.nap_s), has_work);
      } else {
        yields = !result.moved;
      }
      if (stop_) break;
      if (inline_drivers_ > 0) continue;
      woken_ = false;
    }
    if (yields) std::this_thread::yield();
    {
      const std::lock_guard<std::mutex> drive(drive_mutex_);
      result = Pass();
    }
    RunFinished();
  }
  {
    const std::lock_guard<std::mutex> drive(drive_mutex_);
    TakeInbox();
    if (!active_.empty())
      FailAll(Error("The engine was shut down while communication was under way.", ErrorKind::kUsage));
  }
  RunFinished();
}

// Take over what callers have enqueued, in order of arrival. Returns whether the engine works.
bool Progress::TakeInbox() {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  for (auto& operation : inbox_) {
    operation->TakePlaces();
    const auto later = [](const std::shared_ptr<Operation>& a, const std::shared_ptr<Operation>& b) {
      return a->priority != b->priority ? a->priority < b->priority : a->sequence_ < b->sequence_;
    };
    active_.insert(std::upper_bound(active_.begin(), active_.end(), operation, later), operation);
  }
  inbox_.clear();
  const double now = newly_ready_.empty() ? 0 : Now();
  for (auto& operation : newly_ready_) {
    operation->seen_ready_ = true;
    operation->ready_s_ = operation->moved_s_ = now;
    flight_.Add(Flight::kReady, operation->what, operation->sequence_, now);
  }
  newly_ready_.clear();
  return !error_ && !stop_;
}

bool Progress::Blocked(const Operation& operation) const {
  if (!operation.seen_ready_) return true;
  if (operation.current_ == operation.stages.size()) return false;
  const OrderQueue* order = operation.stages[operation.current_].order;
  return order != nullptr && order->front() != &operation;
}

Progress::PassResult Progress::Pass() {
  PassResult result;
  if (!TakeInbox()) return result;
  const double now = Now();
  if (lost_) return AwaitNames(now);
  ForgiveStop(now);
  const bool check_deadlines = now >= next_deadline_check_s_;
  if (check_deadlines) next_deadline_check_s_ = now + kDeadlineCheckS;
  try {
    result.moved = options_.begin_pass(now);
    for (const auto& operation : active_) {
      if (Blocked(*operation)) {
        if (!operation->seen_ready_) continue;
        result.waiting = true;
        continue;
      }
      result.moved |= StepOne(*operation, now);
      if (operation->ended_) continue;
      result.waiting = true;
      if (const auto& waits = operation->stages[operation->current_].collective) {
        result.most_nap_s = std::min(result.most_nap_s, waits->MostNapS());
      }
      if (check_deadlines) CheckDeadline(*operation, now - operation->moved_s_);
    }
    // Those that wait for their turn come last: the operation before them can tell which rank is late.
    for (const auto& operation : active_) {
      if (!check_deadlines || !operation->seen_ready_ || !Blocked(*operation)) continue;
      // Only time without progress of any operation counts.
      CheckDeadline(*operation, now - std::max(moved_s_, operation->moved_s_));
    }
    if (check_deadlines && options_.stall_s > 0) TellStall(now);
  } catch (const std::exception& failure) {
    const Error error = ErrorOf(failure);
    if (error.kind() != ErrorKind::kLost) {
      FailAll(error);
      return {};
    }
    AwaitNames(error);
    return AwaitNames(now);
  }
  const auto ended = [&](const std::shared_ptr<Operation>& operation) {
    if (!operation->ended_) return false;
    finished_.push_back({operation, std::nullopt});
    return true;
  };
  passed_s_ = result.waiting ? Now() : 0;
  if (result.moved) moved_s_ = now;
  const double most_nap_s = options_.most_nap_s();
  result.watches = most_nap_s < std::numeric_limits<double>::infinity();
  result.most_nap_s = std::min(result.most_nap_s, most_nap_s);
  if (!result.moved) {
    const double nap_s =
        result.waiting || !result.watches ? options_.nap_s(idle_passes_ + 1, now - moved_s_) : most_nap_s;
    result.nap_s = std::min(nap_s, result.most_nap_s);
  }
  idle_passes_ = result.moved || result.nap_s == 0 ? 0 : idle_passes_ + 1;
  result.waiting |= result.watches;
  if (result.moved) active_.erase(std::remove_if(active_.begin(), active_.end(), ended), active_.end());
  return result;
}

void Progress::AwaitNames(const Error& error) {
  lost_ = error;
  lost_s_ = Now();
}

// Move nothing any more.
Progress::PassResult Progress::AwaitNames(double now) {
  PassResult result;
  if (now - lost_s_ > kNamesLostS) {
    FailAll(*lost_);
    return result;
  }
  result.waiting = true;
  result.nap_s = result.most_nap_s = kNamesNapS;
  return result;
}

// In a job that was stopped as a whole (suspended by its scheduler) each rank finds that nothing has moved
// for long.
void Progress::ForgiveStop(double now) {
  const double away_s = passed_s_ > 0 ? now - passed_s_ : 0;
  if (away_s < kStoppedS) return;
  moved_s_ = std::min(now, moved_s_ + away_s);
  for (const auto& operation : active_) operation->moved_s_ = std::min(now, operation->moved_s_ + away_s);
}

// Step the current stage and, while stages end at once, the next ones. Returns true on progress.
bool Progress::StepOne(Operation& operation, double now) {
  bool moved = false;
  while (operation.current_ < operation.stages.size()) {
    Operation::Stage& stage = operation.stages[operation.current_];
    if (stage.order != nullptr && stage.order->front() != &operation) return moved;
    if (!stage.collective) {
      stage.collective = stage.make(operation);
      operation.moved_s_ = now;  // the deadline counts from the start of the stage
    }
    const bool stepped = stage.collective->Step();
    if (stepped) {
      moved = true;
      operation.moved_s_ = now;
      if (operation.started_s_ == 0) {
        operation.started_s_ = operation.traced != nullptr ? Now() : now;
        flight_.Add(Flight::kBegun, operation.what, operation.sequence_, operation.started_s_);
      }
    }
    if (!stage.collective->done()) return moved;
    EndStage(operation);
    moved = true;
  }
  if (operation.check) operation.check(operation);
  operation.ended_ = true;
  ++counters_.operations;
  const double end = Now();
  flight_.Add(Flight::kDone, operation.what, operation.sequence_, end);
  if (operation.traced != nullptr && log_.enabled()) {
    const double started = operation.started_s_ == 0 ? end : operation.started_s_;
    if (operation.of_all_ranks) log_.Add("wait", operation.what, operation.ready_s_, started);
    log_.Add(operation.traced, operation.what, started, end);
  }
  return true;
}

void Progress::EndStage(Operation& operation) {
  Operation::Stage& stage = operation.stages[operation.current_];
  if (stage.order != nullptr) stage.order->pop_front();
  ++operation.current_;
}

void Progress::FailAll(const Error& error) {
  {
    // From now on Enqueue throws. Operations still in the inbox fail with the others.
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    if (!error_) {
      error_ = error;
      flight_.Add(Flight::kFailed, error.what(), 0);
    }
    active_.insert(active_.end(), inbox_.begin(), inbox_.end());
    inbox_.clear();
    newly_ready_.clear();
  }
  for (auto& operation : active_) {
    for (Operation::Stage& stage : operation->stages) {
      if (stage.order != nullptr) stage.order->clear();
    }
    finished_.push_back({operation, error});
    failed_.push_back(std::move(operation));
  }
  active_.clear();
  failing_ = true;
}

void Progress::RunFinished() {
  std::vector<Finished> ended;
  bool failing = false;
  {
    const std::lock_guard<std::mutex> drive(drive_mutex_);
    ended.swap(finished_);
    failing = std::exchange(failing_, false);
  }
  for (Finished& one : ended) {
    if (one.operation->finished) one.operation->finished(one.error ? &*one.error : nullptr);
  }
  if (failing) options_.failed();  // after all `finished` callbacks
}

}  // namespace hvpipe
