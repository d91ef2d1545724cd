// A thread that waits, because a call without end holds the one that made it.
#include "base/exit_timer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace hvpipe {

void EndProcess(const std::string& message, const std::string& abort_marker) {
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  if (!abort_marker.empty())
    open(abort_marker.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  _exit(1);
}

void FailAtExit() {
  on_exit([](int status, void*) { _exit(status == 0 ? 1 : status); }, nullptr);
}

ExitTimer::ExitTimer(double limit_s, std::string message, std::string abort_marker)
    : message_(std::move(message)),
      abort_marker_(std::move(abort_marker)),
      thread_([this, limit_s] { Wait(limit_s); }) {}

ExitTimer::~ExitTimer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void ExitTimer::Wait(double limit_s) {
  constexpr double kLongestS = 1e8;  // the clock cannot count to infinity
  const std::chrono::duration<double> limit(std::min(limit_s, kLongestS));
  std::unique_lock<std::mutex> lock(mutex_);
  if (wake_.wait_for(lock, limit, [this] { return stopped_; })) return;
  EndProcess(message_, abort_marker_);
}

}  // namespace hvpipe
