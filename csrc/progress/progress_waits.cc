// The part of Progress that looks at waits: deadlines, stalls, and what this rank waits for.
#include <algorithm>
#include <sstream>

#include "progress/progress.h"

namespace hvpipe {

void Progress::CheckDeadline(const Operation& operation, double waited_s) const {
  const Operation::Stage& stage = operation.stages[operation.current_];
  const double grace_s = stage.collective ? stage.collective->GraceS() : 0;
  const bool own_limit = operation.limit_s > 0;
  const double limit_s = own_limit ? operation.limit_s : this->limit_s();
  if (waited_s < limit_s + grace_s) return;
  std::ostringstream text;
  text << "Waited " << limit_s << " s in " << operation.what << " for ";
  if (stage.collective) {
    text << stage.collective->Waiting()
         << ". Has that rank ended, or is it busy for longer than the time limit?";
  } else {
    text << "an earlier operation, which has not ended.";
  }
  text << " Raise the limit with "
       << (own_limit                      ? "HVPIPE_SHUTDOWN_TIMEOUT."
           : limit_s > options_.timeout_s ? "HVPIPE_FIRST_STEP_TIMEOUT."
                                          : "HVPIPE_TIMEOUT or hvpipe.init(timeout_s=...).")
       << options_.report();
  throw Error(text.str(), ErrorKind::kDeadline);
}

// The most urgent operation that waits for other ranks, a patient one last. Requires drive_mutex_.
std::optional<Stall> Progress::StallOf(double now) const {
  std::optional<Stall> patient;
  for (const auto& operation : active_) {
    const bool has_stage = operation->current_ < operation->stages.size();
    if (operation->ended_ || !has_stage || Blocked(*operation)) continue;
    const Collective* const collective = operation->stages[operation->current_].collective.get();
    const double waited_s = now - std::max(moved_s_, operation->moved_s_);
    Stall stall{operation->what, collective == nullptr ? "its turn" : collective->Waiting(), waited_s,
                operation->sequence_};
    if (collective != nullptr) stall.ranks = collective->Ranks();
    stall.patient = operation->limit_s > 0;
    if (!stall.patient) return stall;
    if (!patient) patient = stall;
  }
  return patient;
}

// Once for each time that all communication of this rank stands still.
void Progress::TellStall(double now) {
  if (stall_told_s_ > moved_s_) return;
  const auto stall = StallOf(now);
  if (!stall || stall->patient || stall->waited_s < options_.stall_s) return;
  stall_told_s_ = now;
  options_.stalled(*stall);
}

std::optional<Stall> Progress::WaitsNow() {
  constexpr int kTries = 50;
  for (int i = 0; i < kTries; ++i) {
    const std::unique_lock<std::mutex> drive(drive_mutex_, std::try_to_lock);
    if (drive) return StallOf(Now());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::nullopt;
}

}  // namespace hvpipe
