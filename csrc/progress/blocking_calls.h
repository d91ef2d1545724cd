// Blocking collectives of host memory. All ranks call them in the same order.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/turns.h"
#include "progress/agreement.h"
#include "progress/messenger.h"
#include "progress/network.h"
#include "progress/progress.h"
#include "progress/reduce.h"

namespace hvpipe {

// How long ranks wait for one that may be busy with other work.
struct Patience {
  double limit_s = 0;  // 0: the engine's
  // Called once, after `late_s` seconds, with the next rank if nothing has come from it.
  std::function<void(int rank)> late;
  double late_s = 0;
  std::string shown;  // what the errors of other ranks say that this one is at; empty: `what`
};

// Each call first checks that all ranks make the same call, and runs on the calling thread.
//
// Threads: any thread may call, but the order of calls must be the same on all ranks. Calls take turns,
// because a call may enqueue several operations.
class BlockingCalls {
 public:
  BlockingCalls(Progress& progress, Network& network, Agreement& agreement, AllReduceRoute& route)
      : progress_(progress), network_(network), agreement_(agreement), route_(route) {}
  BlockingCalls(const BlockingCalls&) = delete;
  BlockingCalls& operator=(const BlockingCalls&) = delete;

  // out = scale * (sum of in over ranks). in may be out.
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, double scale,
                 const std::string& what, const Interrupt& interrupt);
  void Broadcast(void* data, std::size_t bytes, int root, const std::string& what,
                 const Interrupt& interrupt);
  // Gather `bytes` of each rank, in rank order, on all ranks or on `root` alone. `out` may begin with `in`.
  void Gather(const void* in, void* out, const std::vector<std::size_t>& bytes, std::optional<int> root,
              const std::string& what, const Interrupt& interrupt);
  // Wait for all ranks. Throws unless all came with the same `what`. Returns the samples of each rank, in
  // rank order.
  std::vector<double> Agree(const std::string& what, double samples, const Interrupt& interrupt,
                            const Patience& patience = {});

  // The record of the next rank if it has come to an exchange before this rank. Empty if that is not known.
  std::optional<Record> EarlyRecord();

  // Wait for the calls that other threads began before, and keep later ones out while the result lives.
  Turns::Turn TakeTurn(const Interrupt& interrupt) { return turns_.Take(interrupt); }
  // For the calls of device memory: wait until all ranks are at the call `what`.
  void CheckSameCall(const std::string& what, const Interrupt& interrupt);
  static std::shared_ptr<Operation> MakeOperation(const std::string& what);
  // The message tag of the next call.
  int NextTag();

 private:
  std::optional<int> OwnTag(const std::string& what, const Transport& ring);
  void AllReduceChecked(const void* in, void* out, std::size_t count, DType dtype, double scale,
                        const std::string& what, Transport& ring, std::optional<int> own_tag,
                        const Interrupt& interrupt);
  void RunChecked(const std::string& what, Operation::MakeCollective make, const Interrupt& interrupt);
  void CheckNobodyWaits(const std::string& shown);
  void CheckPeersAreHere(SharedWindow& window, const Operation& own);

  Progress& progress_;
  Network& network_;
  Agreement& agreement_;
  AllReduceRoute& route_;
  Turns turns_;
  std::atomic<unsigned> calls_{0};  // may wrap round
};

}  // namespace hvpipe
