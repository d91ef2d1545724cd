// Collectives that ranks call by name, in any order and from any thread: the service thread of one rank.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/operation.h"
#include "named/coordinator.h"
#include "named/links.h"
#include "named/process_set.h"

namespace hvpipe {
class Engine;
}

namespace hvpipe::named {

// Gradients of `data_parallel` do not come here: their buckets are planned once and never negotiated.
//
//   any thread: Submit -> inbox | service thread: tell rank 0 -> wait for its response -> collective ->
//   done
//
// Rank 0 also has the coordinator. Ranks run the responses in the coordinator's order.
//
// Threads: any thread may call the public functions; mutex_ guards the inbox. Everything else belongs to the
// service thread, which starts with the first call.
class NamedCalls : public std::enable_shared_from_this<NamedCalls> {
 public:
  // Collective. Null: one rank.
  NamedCalls(std::unique_ptr<Links> links, double timeout_s);
  ~NamedCalls();
  NamedCalls(const NamedCalls&) = delete;
  NamedCalls& operator=(const NamedCalls&) = delete;

  // Let this watchdog know of calls that wait longer than `warn_s`, and end the process with EndProcess if
  // MPI holds the service's thread for too long. Before the first call.
  void WatchWith(const std::shared_ptr<Engine>& engine, double warn_s, const std::string& sign);
  // Start a call; its `done` tells how it ended. Does not wait.
  void Submit(Call call);
  // Submit and wait; returns the response or throws CallError. `interrupt` is called some 20 times a second
  // and may throw.
  Response Run(Call call, const std::function<void()>& interrupt);
  // Tell the others that this rank makes no more calls. Their calls that need it end with an error.
  void Leave();
  // End the threads and free what they used. Collective, after Leave on all ranks.
  void Stop();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // This rank's number on its host, and the ranks there; for TensorFlow's ops. The caller sets them.
  int local_rank = 0, local_size = 1;
  // The ranks of a process set, in ascending order; empty if there is no such set.
  std::vector<int> RanksOf(int set) const;
  // The number of the process set that has these ranks (ascending); -1 if no set has.
  int SetOf(const std::vector<int>& ranks) const;

 private:
  using Key = std::pair<int, std::string>;
  struct UnderWay {
    Call call;
    double since_s;
    double clock_s;     // ClockOf its process set at that time
    bool told = false;  // of its wait
  };

  // Lets EndIfStuck see that a collective of MPI runs.
  class InMpi {
   public:
    InMpi(NamedCalls& calls, const Response& response, const Call* call, int ranks);
    ~InMpi();
    InMpi(const InMpi&) = delete;
    InMpi& operator=(const InMpi&) = delete;

   private:
    NamedCalls& calls_;
    const int set_;
  };

  void LoseProcess(const Error& error);
  void EndIfStuck() const;
  void LookAtWaits(double now_s);
  Stall StallOf(const UnderWay& under_way, double now_s) const;
  std::optional<Stall> WaitsNow() const;
  void TellStall(double now_s);
  void TakeLost(const std::vector<int>& ranks);
  void StartThread();
  void Loop();
  double ClockOf(int set) const;
  bool TakeInbox();
  void Take(Call call);
  bool Receive();
  bool Expire();
  void Rest(bool sends);
  void Coordinate(std::vector<Coordinator::Outgoing> responses);
  void Handle(const Response& response);
  void RunCollective(const Response& response, Call* call);
  void End(const Key& key, const CallError* error, const Response* response);
  void FailAll(const CallError& error);

  const int rank_, size_;
  const double timeout_s_;
  const std::unique_ptr<Links> links_;
  std::optional<Coordinator> coordinator_;  // on rank 0

  mutable std::mutex sets_mutex_;
  std::map<int, std::shared_ptr<ProcessSet>> sets_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> inbox_;
  bool stop_ = false;
  bool started_ = false;
  bool left_ = false;
  bool abandoned_ = false;  // ends without Stop, perhaps after MPI_Finalize
  std::optional<CallError> failed_;
  std::string lost_;  // says which rank's process has ended; empty: none

  std::weak_ptr<Engine> engine_;  // has the watchdog
  double warn_s_ = 0;             // 0: nobody is told of waits
  std::string end_sign_;          // for EndProcess
  double looked_s_ = 0;           // for long waits
  std::set<int> lost_ranks_;      // whose connections have ended

  mutable std::mutex under_way_mutex_;  // for changes, and for looks of other threads
  std::map<Key, UnderWay> under_way_;
  std::string in_mpi_;         // the collective that MPI runs, which nothing can interrupt
  double in_mpi_since_s_ = 0;  // 0: none
  double in_mpi_limit_s_ = 0;
  double active_s_ = 0;                  // when something last happened
  std::map<int, double> collectives_s_;  // time spent in collectives, by process set
  std::thread thread_;
};

// The calls of the default session, which TensorFlow's kernels use. Null without a session.
void SetDefaultCalls(std::shared_ptr<NamedCalls> calls);
std::shared_ptr<NamedCalls> DefaultCalls();

}  // namespace hvpipe::named
