// Collectives that ranks call by name, in any order and from any thread: the service thread of one rank.
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "named/call.h"
#include "named/coordinator.h"
#include "named/process_set.h"

namespace hvpipe::named {

// Gradients of `data_parallel` do not come here: their buckets are planned once and never negotiated.
//
//   any thread: Submit -> inbox | service thread: tell rank 0 -> wait for its response -> MPI collective ->
//   done
//
// Rank 0 also has the coordinator. Ranks run the responses in the coordinator's order.
//
// Threads: any thread may call the public functions; mutex_ guards the inbox. Everything else belongs to the
// service thread, which starts with the first call.
class NamedCalls {
 public:
  // Collective over `world`, which is duplicated. MPI_COMM_NULL: one rank, without MPI.
  NamedCalls(MPI_Comm world, double timeout_s);
  ~NamedCalls();
  NamedCalls(const NamedCalls&) = delete;
  NamedCalls& operator=(const NamedCalls&) = delete;

  // Start a call; its `done` tells how it ended. Does not wait.
  void Submit(Call call);
  // Submit and wait; returns the response or throws CallError. `interrupt` is called some 20 times a second
  // and may throw.
  Response Run(Call call, const std::function<void()>& interrupt);

  // Tell the others that this rank makes no more calls. Their calls that need it end with an error.
  void Leave();
  // End the thread and free the communicators. Collective, after Leave on all ranks.
  void Stop();

  int rank() const { return rank_; }
  // This rank's number on its host, and the ranks there; for TensorFlow's ops. The caller sets them.
  int local_rank = 0, local_size = 1;
  int size() const { return size_; }
  // The ranks of a process set, in ascending order; empty if there is no such set.
  std::vector<int> RanksOf(int set) const;
  std::vector<int> Sets() const;

 private:
  using Key = std::pair<int, std::string>;
  struct Sending {
    std::string bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void StartThread();
  void Loop();
  bool TakeInbox();
  bool Receive();
  bool Expire();
  void Send(int rank, const std::string& bytes, int tag);
  void FinishSends();
  void Rest();
  void Coordinate(std::vector<Coordinator::Outgoing> responses);
  void Handle(const Response& response);
  void RunCollective(const Response& response, Call* call);
  void End(const Key& key, const CallError* error, const Response* response);
  void FailAll(const CallError& error);
  std::string Check(Request& request) const;

  const double timeout_s_;
  MPI_Comm control_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::optional<Coordinator> coordinator_;  // on rank 0

  mutable std::mutex sets_mutex_;
  std::map<int, std::shared_ptr<ProcessSet>> sets_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> inbox_;
  bool stop_ = false;
  bool started_ = false;
  bool left_ = false;
  std::optional<CallError> failed_;

  std::map<Key, Call> under_way_;
  std::list<Sending> sends_;
  double active_s_ = 0;  // when something last happened
  std::thread thread_;
};

// The service of the default session, which TensorFlow's kernels use. Null without a session.
void SetDefaultNamedCalls(std::shared_ptr<NamedCalls> calls);
std::shared_ptr<NamedCalls> DefaultNamedCalls();

}  // namespace hvpipe::named
