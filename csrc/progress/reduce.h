// The route of an all-reduce of host memory: ring, shared-memory window, or both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/telemetry.h"
#include "collectives/shared_memory_reduce.h"
#include "progress/network.h"
#include "progress/operation.h"

namespace hvpipe {

// The source and the destination of an all-reduce. Stages read this when they begin, so it may be set as late
// as that.
struct ReduceBuffers {
  const void* in;
  void* out;
  std::size_t count;
};

// How all-reduces of all ranks travel. Adds the collectives that serve them to operations. All ranks of a
// host choose alike, because the choice depends only on the topology and on whether shared memory is used.
//
//   ranks                     stages
//   all on one host           window
//   one on each host          ring
//   as many on all hosts      window, a slice to each rank | ring of each local rank | window, gather
//   several on some hosts     window to the first rank of the host | ring of the first ranks | window back
//
// Small arrays go the last way on all hosts.
//
// Threads: any thread may add stages. Only the driving thread touches order queues. No lock.
class AllReduceRoute {
 public:
  AllReduceRoute(Network& network, Counters& counters) : network_(network), counters_(counters) {}
  AllReduceRoute(const AllReduceRoute&) = delete;
  AllReduceRoute& operator=(const AllReduceRoute&) = delete;

  const Topology& topology() const { return network_.topology(); }

  // Add the stages of out = scale * (sum of in over all ranks).
  void AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                 double scale, int tag);

  // The window, if it alone serves all ranks; else null.
  SharedWindow* only_window() const;
  // A single collective in the window. Only if there is one.
  std::unique_ptr<Collective> MakeSharedReduce(OperationTag tag, const ReduceBuffers& buffers, DType dtype,
                                               double scale, SharedMemoryReduce::Result result);
  // A single all-reduce among `ranks` that uses no shared memory.
  std::unique_ptr<Collective> MakeAllReduce(Transport& ranks, const void* in, void* out, std::size_t count,
                                            DType dtype, int tag) {
    return network_.MakeAllReduce(ranks, in, out, count, dtype, tag);
  }

  // The ring, if it alone serves all ranks, of which there are several; else null.
  Transport* only_ring() const;
  // Whether MPI's own algorithms sum an array of so many bytes in that ring.
  bool ring_is_mpis(std::size_t bytes) const {
    return only_ring() != nullptr && network_.SumsFor(*only_ring(), bytes) != nullptr;
  }
  // An all-gather of equal chunks in that ring; chunk r is of rank r.
  std::unique_ptr<Collective> MakeGather(void* data, std::size_t count, DType dtype, int tag) {
    return network_.MakeRing(network_.ring(), data, data, count, dtype, tag, true);
  }

 private:
  // `sliced`: each rank has its slice of the sum over this host; else the first rank has all of it.
  void AddRingStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers, DType dtype,
                    int tag, bool sliced);
  void AddSharedBackStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers,
                          DType dtype, bool sliced);

  Network& network_;
  Counters& counters_;
  OrderQueue shared_order_, mpi_order_;
};

// The identity of an operation in the window.
OperationTag OperationTagOf(const std::string& what, std::uint64_t sequence);

}  // namespace hvpipe
