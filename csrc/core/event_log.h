// What happened when, on this rank: the raw material of the trace.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace hvpipe {

// Seconds on the monotonic clock (the one of Python's time.monotonic()).
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct TimedEvent {
  std::string category;  // "pack", "wait", "reduce", "transfer", "unpack", "mark", or what Python calls it
  std::string name;
  double start_s;
  double end_s;
};

class EventLog {
 public:
  static constexpr std::size_t kMost = 2'000'000;  // some 200 MB: a forgotten trace must not eat the machine

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

  // How many came when there was no more room.
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
