// The part of Progress that runs on a caller's thread: a blocking call drives everything until its operation
// has ended.
#include <algorithm>
#include <utility>

#include "base/backoff.h"
#include "progress/progress.h"

namespace hvpipe {
namespace {

constexpr double kInterruptCheckS = 0.05;
constexpr int kFewSpins = 100;  // then other ranks need the core

Error CauseOf(const std::exception_ptr& interrupted, const std::string& what) {
  try {
    std::rethrow_exception(interrupted);
  } catch (const Error& error) {
    return error;
  } catch (...) {  // such as Ctrl-C
    return Error("Interrupted during: " + what, ErrorKind::kUsage);
  }
}

}  // namespace

std::shared_ptr<Progress::Outcome> Progress::Watch(Operation& operation) {
  const auto outcome = std::make_shared<Outcome>();
  operation.finished = [outcome](const Error* error) {
    if (error != nullptr) outcome->error = *error;
    outcome->ended = true;
  };
  return outcome;
}

void Progress::Run(const std::shared_ptr<Operation>& operation, const Interrupt& interrupt) {
  const auto outcome = Watch(*operation);
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    CheckOpen();
    operation->sequence_ = operation->of_all_ranks ? next_sequence_++ : next_sequence_;
    inbox_.push_back(operation);
    newly_ready_.push_back(operation);
    ++inline_drivers_;
  }
  Drive(*operation, *outcome, std::unique_lock<std::mutex>(drive_mutex_), interrupt);
}

void Progress::Begin(const std::shared_ptr<Operation>& operation, double most_s) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    CheckOpen();
    operation->sequence_ = operation->of_all_ranks ? next_sequence_++ : next_sequence_;
    inbox_.push_back(operation);
    newly_ready_.push_back(operation);
    ++inline_drivers_;
  }
  bool work_remains = true;
  if (std::unique_lock<std::mutex> drive(drive_mutex_, std::try_to_lock); drive) {
    const double until_s = most_s > 0 ? Now() + most_s : 0;
    while (Pass().waiting && !operation->ended_ && until_s > 0 && Now() < until_s) {
      if (spins_.now() > kFewSpins) {
        Relax();
      } else {
        std::this_thread::yield();
      }
    }
    work_remains = !active_.empty() || failing_;
  }
  RunFinished();
  LeaveInline(work_remains);
}

// Continue a collective of RunBrief as an ordinary operation, because some peer is late. No other operation
// can precede it, because nobody else drove. Requires drive_mutex_.
void Progress::Adopt(const std::shared_ptr<Operation>& operation, std::unique_ptr<Collective>& collective,
                     std::uint64_t sequence) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    CheckOpen();  // the progress thread may have ended since
  }
  active_.push_back(operation);
  operation->stages.front().collective = std::move(collective);
  operation->TakePlaces();
  operation->sequence_ = sequence;
  operation->seen_ready_ = true;
  operation->ready_s_ = operation->moved_s_ = Now();
}

void Progress::RunBrief(const std::function<std::unique_ptr<Collective>(std::uint64_t sequence)>& make,
                        const std::function<std::shared_ptr<Operation>()>& operation,
                        const Interrupt& interrupt, bool over_network) {
  if (log_.enabled()) return Run(operation(), interrupt);
  std::unique_lock<std::mutex> drive(drive_mutex_, std::try_to_lock);
  std::uint64_t sequence = 0;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    CheckOpen();
    if (!drive || !active_.empty() || !inbox_.empty()) {
      drive = {};
    } else {
      sequence = next_sequence_++;
      ++inline_drivers_;
    }
  }
  if (!drive) return Run(operation(), interrupt);
  std::unique_ptr<Collective> collective;
  std::shared_ptr<Operation> queued;
  std::shared_ptr<Outcome> outcome;
  std::optional<Error> error;
  try {
    collective = make(sequence);
    collective->Step();
    // Over the network a yield helps, too: MPI on the other ranks of this host has to move the messages.
    Backoff backoff(brief_spins_);
    const double now = over_network ? Now() : 0;
    const auto gives_up = [&] { return over_network ? backoff.Sleeps() : !backoff.Spins(); };
    while (!collective->done() && !gives_up()) {
      if (over_network) (void)options_.begin_pass(now);
      if (!collective->Step()) backoff.Wait(0);
    }
  } catch (const std::exception& failure) {
    error = ErrorOf(failure);
    if (collective && error->kind() == ErrorKind::kLost) AwaitNames(*std::exchange(error, std::nullopt));
  }
  try {
    if (!error && !collective->done()) {
      queued = operation();
      outcome = Watch(*queued);
      Adopt(queued, collective, sequence);
    }
  } catch (const std::exception& failure) {
    error = ErrorOf(failure);
  }
  if (!error && queued) return Drive(*queued, *outcome, std::move(drive), interrupt);
  if (error) {
    left_.push_back(std::move(collective));
    FailAll(*error);
  } else {
    ++counters_.operations;
  }
  drive.unlock();
  if (error) RunFinished();
  LeaveInline(false);
  if (error) throw *error;
}

// Drive all operations until this one has ended.
void Progress::Drive(const Operation& operation, const Outcome& outcome, std::unique_lock<std::mutex> drive,
                     const Interrupt& interrupt) {
  std::exception_ptr interrupted;
  // Several callers that drive at the same time take turns.
  Backoff backoff(spins_);
  double next_interrupt_s = Now() + kInterruptCheckS;
  while (!outcome.ended && !interrupted) {
    const PassResult result = Pass();
    if (!finished_.empty() || failing_) {
      drive.unlock();
      RunFinished();
      drive.lock();
    }
    if (outcome.ended) break;
    if (result.moved) {
      backoff.Reset();
      continue;
    }
    // Asked before others may drive, because they change what the nap depends on.
    const double nap_s =
        backoff.Sleeps() ? std::min(options_.nap_s(backoff.naps(), Now() - moved_s_), result.most_nap_s) : 0;
    if (backoff.Sleeps()) drive.unlock();  // so that another thread may call Fail
    backoff.Wait(nap_s);
    if (!drive.owns_lock()) drive.lock();
    if (Now() < next_interrupt_s) continue;
    next_interrupt_s = Now() + kInterruptCheckS;
    // `interrupt` may wait long for the interpreter lock. The progress thread drives meanwhile.
    drive.unlock();
    LeaveInline(true);
    try {
      interrupt();
    } catch (...) {
      interrupted = std::current_exception();
    }
    EnterInline();
    drive.lock();
  }
  const bool work_remains = !active_.empty();
  drive.unlock();
  LeaveInline(work_remains);
  if (interrupted) {
    // No message tells the peers that this operation will not come, so later operations would not match.
    if (!outcome.ended) Fail(CauseOf(interrupted, operation.what));
    std::rethrow_exception(interrupted);
  }
  if (outcome.error) throw *outcome.error;
}

void Progress::EnterInline() {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  ++inline_drivers_;
}

// End driving on a caller's thread. The progress thread takes over if operations remain.
void Progress::LeaveInline(bool work_remains) {
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    --inline_drivers_;
    woken_ = woken_ || work_remains;
    wake = woken_;
  }
  if (wake) wake_.notify_all();
}

}  // namespace hvpipe
