// What the progress thread drives: a communication that moves forward in steps and never blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/bucket.h"

namespace hvpipe {

class Collective {
 public:
  virtual ~Collective() = default;
  // Moves forward as far as it can without waiting. True if anything moved.
  virtual bool Step() = 0;
  virtual bool done() const = 0;
  // What it waits for, in words, for the message of an expired deadline.
  virtual std::string Waiting() const = 0;
  // How much later its deadline is, where another rank of the host waits for the same and knows for whom.
  virtual double GraceS() const { return 0; }
};

// Several that move side by side.
class Together : public Collective {
 public:
  explicit Together(std::vector<std::unique_ptr<Collective>> parts) : parts_(std::move(parts)) {}
  bool Step() override {
    bool moved = false;
    for (const auto& part : parts_) moved = (!part->done() && part->Step()) || moved;
    return moved;
  }
  bool done() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->done(); });
  }
  std::string Waiting() const override {
    const auto late =
        std::find_if(parts_.begin(), parts_.end(), [](const auto& part) { return !part->done(); });
    return late == parts_.end() ? "nothing" : (*late)->Waiting();
  }

 private:
  std::vector<std::unique_ptr<Collective>> parts_;
};

// Sends in flight that all collectives of an engine share. What one gives back goes to whoever is stepped
// first in the next pass, and that is the most urgent: so a small bucket that the next forward needs first
// overtakes a big one in the middle, instead of each keeping its share.
class SendBudget {
 public:
  explicit SendBudget(int messages) : messages_(messages), available_(messages) {}

  bool empty() const { return available_ == 0; }
  void Take() {
    if (--available_ == 0) since_s_ = now_s_;
  }
  void Return() { ++returned_; }

  void BeginPass(double now_s) {
    now_s_ = now_s;
    if (returned_ == 0) return;
    // Of a time in which there was always something to drain.
    if (empty()) each_s_ += 0.25 * ((now_s - since_s_) / returned_ - each_s_);
    since_s_ = now_s;
    available_ += returned_;
    returned_ = 0;
  }

  // Long enough for a quarter of the sends in flight to end, as fast as they have ended lately. A thread
  // that looks more often gains nothing, and each look takes cache and time from those that compute.
  double QuarterS() const { return each_s_ * messages_ / 4; }

 private:
  int messages_, available_;
  int returned_ = 0;
  double each_s_ = 0;
  double now_s_ = 0, since_s_ = 0;  // of this pass; since some came back, or the last was taken
};

// Traffic of one engine since it started.
struct Counters {
  std::uint64_t network_bytes_sent = 0;
  std::uint64_t network_bytes_received = 0;
  std::uint64_t shared_memory_bytes = 0;  // written to shared memory by this rank
  std::uint64_t messages_sent = 0;
  std::uint64_t operations = 0;
  std::uint64_t steps = 0;
  std::uint64_t sleeps = 0;
  double exposed_wait_s = 0;  // time in which a collect was asked for and its bucket still reducing
};

// The elements [first, first + count) that belong to `part` when `count` elements are cut into `parts`.
struct Range {
  std::size_t first = 0;
  std::size_t count = 0;
};

inline Range PartOf(std::size_t count, std::size_t parts, std::size_t part) {
  const std::size_t base = count / parts;
  const std::size_t extra = count % parts;
  const std::size_t first = part * base + (part < extra ? part : extra);
  return {first, base + (part < extra ? 1 : 0)};
}

}  // namespace hvpipe
