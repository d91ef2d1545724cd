// One caller at a time, in the order in which they came.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace hvpipe {

// Threads: any thread may take a turn. A thread that has one may take another inside it. mutex_ guards the
// queue and is never held while a turn lasts.
class Turns {
 public:
  // A turn lasts as long as this object.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(&turns) {}
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (turns_ != nullptr) turns_->End();
    }

   private:
    Turns* turns_;
  };

  // Wait for those who came before. `interrupt` is called some 20 times a second and may throw.
  Turn Take(const std::function<void()>& interrupt) {
    const auto self = std::this_thread::get_id();
    std::unique_lock<std::mutex> lock(mutex_);
    if (!waiting_.empty() && owner_ == self) {
      ++depth_;
      return Turn(*this);
    }
    const std::uint64_t ticket = next_++;
    waiting_.push_back(ticket);
    const auto is_next = [&] { return waiting_.front() == ticket; };
    // Asked before the wait, which would read the clock even if nobody else waits.
    while (!is_next() && !changed_.wait_for(lock, std::chrono::milliseconds(50), is_next)) {
      lock.unlock();
      try {
        interrupt();
      } catch (...) {
        lock.lock();
        waiting_.erase(std::find(waiting_.begin(), waiting_.end(), ticket));
        changed_.notify_all();
        throw;
      }
      lock.lock();
    }
    owner_ = self;
    depth_ = 1;
    return Turn(*this);
  }

 private:
  void End() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--depth_ > 0) return;
    owner_ = {};
    waiting_.pop_front();
    if (!waiting_.empty()) changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::uint64_t> waiting_;  // tickets; the first one has its turn
  std::uint64_t next_ = 0;
  std::thread::id owner_;  // of the turn
  int depth_ = 0;          // turns that the owner has taken
};

}  // namespace hvpipe
