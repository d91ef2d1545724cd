// Collectives by name that another library runs: a queue between the callers and the threads that call it.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "named/call_service.h"

namespace hvpipe::named {

// Horovod is such a library: it matches calls by name itself (hvpipe/comm/horovod.py has the threads).
//
//   any thread: Submit -> queue | a thread of Python: Take -> Horovod -> Finish or Fail -> done
//
// Threads: any thread may call; mutex_ guards everything.
class QueuedCalls : public CallService {
 public:
  QueuedCalls(int rank, int size);

  void Submit(Call call) override;
  // The library ends the calls of a rank that has left.
  void Leave() override {}
  // End every call that nobody has taken, and the threads that wait in Take.
  void Stop() override;
  std::vector<int> RanksOf(int set) const override;
  std::vector<int> Sets() const override;

  // Wait for a call; null after Stop.
  std::unique_ptr<Call> Take();
  // Tell the caller how its call has ended. `response` has the number of a new process set and its ranks.
  void Finish(const Call& call, const Response& response);
  static void Fail(const Call& call, const CallError& error);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> queue_;
  bool stopped_ = false;
  std::map<int, std::vector<int>> sets_;  // ranks in ascending order, by number
};

}  // namespace hvpipe::named
