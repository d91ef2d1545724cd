// Collectives that ranks call by name, in any order and from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "named/call_stages.h"
#include "named/coordinator.h"
#include "progress/messenger.h"
#include "progress/network.h"
#include "progress/progress.h"

namespace hvpipe::named {

// Gradients of `data_parallel` do not come here: their buckets are planned once and never negotiated.
//
// A call is an operation of Progress. Its first stage tells rank 0 of the call and waits for the answer,
// which comes when all ranks of the process set have made the call. The other stages are its exchanges. Only
// rank 0 has the coordinator.
//
//   any thread: Submit -> | driving thread: tell rank 0 -> wait for its answer -> exchanges | -> done
//
// The data of a call go before buckets (as messages do), because somebody usually waits for it.
//
// Threads: any thread may call the public functions; mutex_ guards what they share with the driving thread,
// and the rest belongs to the driving thread, which calls Serve.
class NamedCalls {
 public:
  NamedCalls(Progress& progress, Network& network, Messenger& messenger);
  // One rank, without an engine: every call ends within Submit.
  NamedCalls();
  NamedCalls(const NamedCalls&) = delete;
  NamedCalls& operator=(const NamedCalls&) = delete;

  // Start a call; its `done` tells how it ended. Does not wait for other ranks.
  void Submit(Call call);
  // Submit and wait; returns the response or throws. `interrupt` is called some 20 times a second and may
  // throw.
  Response Run(Call call, const Interrupt& interrupt);
  // Make a process set of these ranks and return its number. All ranks call it.
  int AddSet(const std::vector<std::int64_t>& ranks, const Interrupt& interrupt);
  // Tell the others that this rank makes no more calls. Their calls that need it end with an error.
  void Leave();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // This rank's number on its host, and the ranks there; for TensorFlow's ops. The caller sets them.
  int local_rank = 0, local_size = 1;
  // The ranks of a process set, in ascending order; empty if there is no such set.
  std::vector<int> RanksOf(int set) const;
  // The number of the process set that has these ranks (ascending); -1 if no set has.
  int SetOf(const std::vector<int>& ranks) const;

  // For Progress. Take messages of other ranks; returns whether any had come.
  bool Serve(double now_s);
  // Whether to look again at once, `idle_s` seconds after the last progress of any operation.
  bool eager(double idle_s) const {
    const double quiet_s = now_s_ - active_s_;
    return (awaits() && quiet_s < kEagerS) || (!exchanging_.empty() && std::min(quiet_s, idle_s) < kEagerS);
  }
  // Rank 0 looks for calls of others this often, in seconds, even if none is under way.
  double serve_s() const {
    if (!coordinator_ || size_ == 1) return std::numeric_limits<double>::infinity();
    return started_ ? kServeS : kSeldomS;
  }

 private:
  using Key = std::pair<int, std::string>;  // process set and name
  class Answer;
  struct Pending;

  // After something happened, look again at once for this long.
  static constexpr double kEagerS = 200e-6;
  static constexpr double kServeS = 2e-3, kSeldomS = 0.5;
  // The caller of a call drives it for this long, if no other call is under way. Handing it to the thread and
  // back takes as long, and longer on a host with more ranks than cores.
  static constexpr double kOnCallerS = 100e-6, kOnCallerCrowdedS = 2e-3;

  bool awaits() const { return !pending_.empty() || (coordinator_ && !coordinator_->idle()); }
  void RunAlone(Call& call);
  void Ended(const Key& key, const Call& call, const Error* error, const Response* response);
  void Announce(const Request& request);
  void Tell(std::vector<Coordinator::Outgoing> responses);
  void Handle(Response response);
  void AddZeros(Response response);
  void Begin(Operation& operation, const std::shared_ptr<AgreedCall>& agreed);
  void RemoveSet(int set);
  void TakeLost();
  void CheckAnswers() const;
  double ClockOf(int set) const;
  void LetClocksRun(double now_s);
  std::string WaitsFor(const Key& key) const;

  Progress* const progress_ = nullptr;  // null: alone
  Network* const network_ = nullptr;
  Messenger* const messenger_ = nullptr;
  const int rank_ = 0, size_ = 1;
  const double timeout_s_ = 0;

  Turns adding_;  // of AddSet
  mutable std::mutex mutex_;
  std::map<int, Members> sets_;
  std::set<Key> in_use_;                    // calls of this rank that have not ended
  std::map<std::vector<int>, int> groups_;  // made so far, by ranks
  std::atomic<bool> left_{false};

  // Of the driving thread; if this rank is alone, guarded by mutex_.
  std::optional<Coordinator> coordinator_;           // on rank 0
  bool started_ = false;                             // a call was made here, or rank 0 has heard of one
  std::map<Key, std::shared_ptr<Pending>> pending_;  // calls of this rank without an answer
  std::deque<Response> early_;                       // for a process set that this rank is still making
  std::map<const Transport*, int> next_tags_;
  OrderQueue window_order_;
  std::map<int, int> exchanging_;    // calls whose exchanges are under way, by process set
  std::map<int, double> stopped_s_;  // how long the clock of calls has stood still, by process set
  double stopped_all_s_ = 0;         // for all sets
  double now_s_ = 0, active_s_ = 0, looked_s_ = 0;
  std::set<int> lost_;
};

// The calls of the default session, which TensorFlow's kernels use. Null without a session.
void SetDefaultCalls(std::shared_ptr<NamedCalls> calls);
std::shared_ptr<NamedCalls> DefaultCalls();

}  // namespace hvpipe::named
