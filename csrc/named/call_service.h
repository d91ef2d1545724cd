// What runs collectives that ranks call by name, as its callers see it. NamedCalls (named_calls.h) is one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "named/call.h"

namespace hvpipe {
class Engine;
}

namespace hvpipe::named {

// Threads: any thread may call.
class CallService {
 public:
  CallService(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~CallService() = default;
  CallService(const CallService&) = delete;
  CallService& operator=(const CallService&) = delete;

  // Start a call; its `done` tells how it ended. Does not wait.
  virtual void Submit(Call call) = 0;
  // Let this watchdog know of calls that wait longer than `warn_s`, and end the process with EndProcess if
  // MPI holds the service's thread for too long. Before the first call.
  virtual void WatchWith(const std::shared_ptr<Engine>& engine, double warn_s, const std::string& sign) = 0;
  // Submit and wait; returns the response or throws CallError. `interrupt` is called some 20 times a second
  // and may throw.
  Response Run(Call call, const std::function<void()>& interrupt);

  // Tell the others that this rank makes no more calls. Their calls that need it end with an error.
  virtual void Leave() = 0;
  // End the threads and free what they used. Collective, after Leave on all ranks.
  virtual void Stop() = 0;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // This rank's number on its host, and the ranks there; for TensorFlow's ops. The caller sets them.
  int local_rank = 0, local_size = 1;
  // The ranks of a process set, in ascending order; empty if there is no such set.
  virtual std::vector<int> RanksOf(int set) const = 0;
  virtual std::vector<int> Sets() const = 0;

 protected:
  // Complete the request, and return why this rank cannot take part; empty: it can. Throws CallError if the
  // call does not concern the other ranks.
  std::string Check(Request& request) const;

  int rank_;
  int size_;
};

// The service of the default session, which TensorFlow's kernels use. Null without a session.
void SetDefaultCallService(std::shared_ptr<CallService> service);
std::shared_ptr<CallService> DefaultCallService();

}  // namespace hvpipe::named
