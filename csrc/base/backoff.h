// How a thread waits between two looks at something that other ranks do.
#pragma once

#include <chrono>
#include <thread>

namespace hvpipe {

// A pause instruction; on other CPUs a yield.
inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The wait between two passes of a caller that has nothing else to do: spins first, then yields, then sleeps.
// If another process wants the core, a yield may cost a whole time slice (milliseconds), while a sleep ends
// on time. So after a slow yield all waits sleep, until there is progress.
class Backoff {
 public:
  // The first `spins` waits spin.
  explicit Backoff(int spins) : spins_(spins) {}
  void Reset() { idle_ = 0; }
  // True if the next wait spins; if it sleeps.
  bool Spins() const { return idle_ < spins_; }
  bool Sleeps() const { return idle_ >= spins_ + kYields; }
  // How many waits have slept since the last progress.
  int naps() const { return idle_ - spins_ - kYields; }
  // `nap_s`: how long to sleep, in seconds, if this wait sleeps.
  void Wait(double nap_s) {
    ++idle_;
    if (idle_ <= spins_) return Relax();
    if (idle_ <= spins_ + kYields) return Yield();
    std::this_thread::sleep_for(std::chrono::duration<double>(nap_s));
  }

 private:
  void Yield() {
    const auto began = std::chrono::steady_clock::now();
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() - began > kSlowYield) idle_ = spins_ + kYields;
  }

  static constexpr std::chrono::microseconds kSlowYield{200};
  static constexpr int kYields = 2000;
  const int spins_;
  int idle_ = 0;
};

}  // namespace hvpipe
