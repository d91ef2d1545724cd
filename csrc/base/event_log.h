// The timed events of this rank, from which the trace is made.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace hvpipe {

// Seconds on the monotonic clock, the same as Python's time.monotonic().
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct TimedEvent {
  std::string category;  // "pack", "wait", "reduce", "transfer", "unpack", "mark", or a category from Python
  std::string name;
  double start_s;
  double end_s;
};

// Threads: any thread may call; a lock guards the events.
class EventLog {
 public:
  static constexpr std::size_t kMost =
      2'000'000;  // some 200 MB, so that a forgotten trace does not fill the memory

  explicit EventLog(bool enabled, std::size_t most = kMost) : enabled_(enabled), most_(most) {}
  bool enabled() const { return enabled_; }

  void Add(const std::string& category, const std::string& name, double start_s, double end_s) {
    if (!enabled_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() < most_) {
      events_.push_back({category, name, start_s, end_s});
    } else {
      ++dropped_;
    }
  }

  std::vector<TimedEvent> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
  }

  // Events that came after the log was full.
  std::size_t dropped() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return dropped_;
  }

 private:
  const bool enabled_;
  const std::size_t most_;
  mutable std::mutex mutex_;
  std::vector<TimedEvent> events_;
  std::size_t dropped_ = 0;
};

}  // namespace hvpipe
