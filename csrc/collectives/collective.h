// A communication that moves forward in steps and never blocks; Progress drives it.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hvpipe {

class Collective {
 public:
  virtual ~Collective() = default;
  // Move forward as far as possible without waiting. Returns true on progress.
  virtual bool Step() = 0;
  virtual bool done() const = 0;
  // Describes what it waits for, for the message of a deadline error.
  virtual std::string Waiting() const = 0;
  // The ranks of all ranks that it waits for; empty: it may be any.
  virtual std::vector<int> Ranks() const { return {}; }
  // Seconds by which its deadline is later. Not 0 if another rank of the host waits for the same and can name
  // the cause.
  virtual double GraceS() const { return 0; }
  // The longest time to sleep before the next step, in seconds.
  virtual double MostNapS() const { return std::numeric_limits<double>::infinity(); }
};

// Several collectives that run side by side. Done when all are done.
class ConcurrentCollectives : public Collective {
 public:
  explicit ConcurrentCollectives(std::vector<std::unique_ptr<Collective>> members)
      : members_(std::move(members)) {}
  bool Step() override {
    bool moved = false;
    for (const auto& member : members_) moved = (!member->done() && member->Step()) || moved;
    return moved;
  }
  bool done() const override {
    return std::all_of(members_.begin(), members_.end(), [](const auto& member) { return member->done(); });
  }
  std::string Waiting() const override {
    const Collective* const late = Late();
    return late == nullptr ? "nothing" : late->Waiting();
  }
  // Of the first that is not done, as in Waiting.
  std::vector<int> Ranks() const override {
    const Collective* const late = Late();
    return late == nullptr ? std::vector<int>{} : late->Ranks();
  }
  double MostNapS() const override {
    double least_s = Collective::MostNapS();
    for (const auto& member : members_) {
      if (!member->done()) least_s = std::min(least_s, member->MostNapS());
    }
    return least_s;
  }

 private:
  // The first that is not done; null: none.
  const Collective* Late() const {
    const auto late =
        std::find_if(members_.begin(), members_.end(), [](const auto& member) { return !member->done(); });
    return late == members_.end() ? nullptr : late->get();
  }

  std::vector<std::unique_ptr<Collective>> members_;
};

}  // namespace hvpipe
