// The route of an all-reduce of host memory: ring, shared-memory lane, or both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "collectives/lane_reduce.h"
#include "core/communicators.h"
#include "core/operation.h"
#include "core/telemetry.h"

namespace hvpipe {

// The source and the destination of an all-reduce. Stages read this when they begin, so it may be set as late
// as that.
struct ReduceBuffers {
  const void* in;
  void* out;
  std::size_t count;
};

// Chooses the collectives that serve all ranks and adds them to operations. All ranks of a host choose alike,
// because the choice depends only on the topology and on whether shared memory is used.
//
//   ranks                     stages
//   all on one host           lane
//   one on each host          ring
//   several on some hosts     lane to the first rank of the host | ring of the first ranks | lane back
//
// Threads: any thread may add stages. Only the driving thread touches the order queue. No lock.
class AllReduceRoute {
 public:
  AllReduceRoute(Communicators& communicators, Counters& counters)
      : communicators_(communicators), counters_(counters) {}
  AllReduceRoute(const AllReduceRoute&) = delete;
  AllReduceRoute& operator=(const AllReduceRoute&) = delete;

  const Topology& topology() const { return communicators_.topology(); }
  // The lane, if it alone serves all ranks; else null.
  Lane* only_lane() const;

  // Add the stages of out = scale * (sum of in over all ranks).
  void AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                 double scale, int tag);

  // The single collectives. MakeRing works in place.
  std::unique_ptr<Collective> MakeRing(Transport& ranks, void* data, std::size_t count, DType dtype, int tag);
  std::unique_ptr<Collective> MakeLaneReduce(LaneTag tag, const ReduceBuffers& buffers, DType dtype,
                                             double scale, LaneReduce::Result result);

 private:
  void AddRingStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers, DType dtype,
                    int tag);
  void AddLaneBroadcastStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers,
                             DType dtype);

  Communicators& communicators_;
  Counters& counters_;
  OrderQueue lane_order_;
};

// The identity of an operation in the lane.
LaneTag LaneTagOf(const std::string& what, std::uint64_t sequence);

}  // namespace hvpipe
