// How a thread waits between two looks at something that other ranks do.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace hvpipe {

// A pause instruction; on other CPUs a yield.
inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// How many looks in a row a caller takes at once. Waits that outlast them make it fewer: the core may be what
// the others wait for, as with containers that share a machine. Waits that nearly do make it more again.
class SpinLimit {
 public:
  explicit SpinLimit(int most) : most_(most), now_(most) {}
  int now() const { return now_; }
  // A wait has ended after so many looks.
  void Learn(int looks) {
    if (looks > now_) now_ = std::max(std::min(kLeast, most_), now_ / 2);
    if (looks > now_ / 2 && looks <= now_) now_ = std::min(most_, 2 * now_);
  }

 private:
  static constexpr int kLeast = 16;
  const int most_;
  int now_;
};

// The wait between two passes of a caller that has nothing else to do: spins first, then yields, then sleeps.
// If another process wants the core, a yield may cost a whole time slice (milliseconds), while a sleep ends
// on time. So after a slow yield all waits sleep, until there is progress.
class Backoff {
 public:
  // `spins` outlives this.
  explicit Backoff(SpinLimit& spins) : spins_(spins) {}
  ~Backoff() { Reset(); }
  Backoff(const Backoff&) = delete;
  Backoff& operator=(const Backoff&) = delete;

  // There was progress.
  void Reset() { spins_.Learn(std::exchange(idle_, 0)); }
  // True if the next wait spins; if it sleeps.
  bool Spins() const { return idle_ < spins_.now(); }
  bool Sleeps() const { return naps() >= 0; }
  // How many waits have slept since the last progress.
  int naps() const { return idle_ - spins_.now() - kYields; }
  // `nap_s`: how long to sleep, in seconds, if this wait sleeps.
  void Wait(double nap_s) {
    const bool spins = Spins(), sleeps = Sleeps();
    ++idle_;
    if (spins) return Relax();
    if (!sleeps) return Yield();
    std::this_thread::sleep_for(std::chrono::duration<double>(nap_s));
  }

 private:
  void Yield() {
    const auto began = std::chrono::steady_clock::now();
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() - began > kSlowYield) idle_ = spins_.now() + kYields;
  }

  static constexpr std::chrono::microseconds kSlowYield{200};
  static constexpr int kYields = 2000;
  SpinLimit& spins_;
  int idle_ = 0;
};

}  // namespace hvpipe
