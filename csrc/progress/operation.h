// One piece of communication as callers enqueue it: collectives in sequence, with a priority.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collectives/collective.h"

namespace hvpipe {

class Operation;

// What a rank waits for, in words.
struct Stall {
  std::string what;     // the operation
  std::string waiting;  // for whom or what
  double waited_s = 0;  // without any progress of this rank's communication
  std::uint64_t sequence = 0;
  std::vector<int> ranks{};  // that take part; empty: all
  bool patient = false;      // a rank may be busy with other work for long
};

// Called once when a request has ended, from another thread, without any lock held. Null: success.
using Done = std::function<void(const Error* error)>;
// Called some 20 times a second while a call waits; may throw.
using Interrupt = std::function<void()>;

// Operations that share a resource use it in the order in which they were enqueued. That order is the same on
// all ranks.
using OrderQueue = std::deque<Operation*>;

// A sequence of collectives. Callers fill it in and enqueue it in Progress. From then on only the driving
// thread touches it.
class Operation {
 public:
  struct Stage {
    // Called when the stage begins, because its buffers may not exist earlier.
    std::function<std::unique_ptr<Collective>(const Operation&)> make;
    OrderQueue* order = nullptr;  // null: the stage waits for no other operation
    bool in_order = false;        // the operation has a place in `order` for it
    std::unique_ptr<Collective> collective;
  };
  using MakeCollective = std::function<std::unique_ptr<Collective>(const Operation&)>;

  // Append a stage that `make` creates, in turn with the other operations of `order`.
  void AddStage(MakeCollective make, OrderQueue* order = nullptr) {
    stages.push_back({std::move(make), order, false, nullptr});
  }
  // Take places in the order of each stage, unless that was done. The driving thread calls it: Progress for
  // operations as they arrive, and whoever appends stages later.
  void TakePlaces() {
    for (Stage& stage : stages) {
      if (stage.order != nullptr && !std::exchange(stage.in_order, true)) stage.order->push_back(this);
    }
  }

  std::string what;              // description for messages and the trace
  int priority = 0;              // lower goes first
  const char* traced = nullptr;  // trace category of its running time; null: not traced
  bool of_all_ranks = true;      // every rank enqueues it, so its sequence number is the same on all ranks
  double limit_s = 0;            // of a wait without progress; 0: the engine's
  std::deque<Stage> stages;      // a stage may append others while it is made
  // Runs on the driving thread after the last stage. An exception from it fails the engine.
  std::function<void(Operation&)> check;
  Done finished;

  std::uint64_t sequence() const { return sequence_; }

 private:
  friend class Progress;
  std::uint64_t sequence_ = 0;
  std::size_t current_ = 0;
  bool seen_ready_ = false;
  bool ended_ = false;
  double ready_s_ = 0, started_s_ = 0, moved_s_ = 0;
};

}  // namespace hvpipe
