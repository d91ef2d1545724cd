// Adds the stages of an all-reduce to an operation, by where its ranks are.
#include "core/reduce.h"

#include <cstring>
#include <utility>

#include "collectives/control.h"
#include "collectives/lane_broadcast.h"
#include "core/vector_loops.h"

namespace hvpipe {

std::unique_ptr<Collective> AllReduceRoute::MakeLaneReduce(LaneTag /*tag*/, const ReduceBuffers& /*buffers*/,
                                                           DType /*dtype*/, double /*scale*/,
                                                           LaneReduce::Result /*result*/) {
  throw Error("An all-reduce in shared memory needs MPI", ErrorKind::kUsage);
}

std::unique_ptr<Collective> AllReduceRoute::MakeRing(Transport& /*ranks*/, void* /*data*/,
                                                     std::size_t /*count*/, DType /*dtype*/, int /*tag*/) {
  throw Error("A ring needs MPI", ErrorKind::kUsage);
}

LaneTag LaneTagOf(const std::string& what, std::uint64_t sequence) { return {Hash(what), sequence, what}; }

Lane* MpiRoute::only_lane() const { return topology().hosts == 1 ? communicators_.reduce_lane() : nullptr; }

void MpiRoute::AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                         double scale, int tag) {
  const bool lane_alone = only_lane() != nullptr;
  if (communicators_.reduce_lane() != nullptr) {
    const auto result = lane_alone ? LaneReduce::Result::kAll : LaneReduce::Result::kLeader;
    const double lane_scale = lane_alone ? scale : 1.0;
    operation.AddStage(
        [=](const Operation& op) {
          return MakeLaneReduce(LaneTagOf(op.what, op.sequence()), *buffers, dtype, lane_scale, result);
        },
        &lane_order_);
  }
  if (lane_alone) return;
  AddRingStage(operation, buffers, dtype, tag);
  AddLaneBroadcastStage(operation, buffers, dtype);
  if (scale != 1.0) {
    auto previous = std::move(operation.check);
    operation.check = [=](Operation& op) {
      if (previous) previous(op);
      Scale(buffers->out, dtype, buffers->count, scale);
    };
  }
}

void MpiRoute::AddRingStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers,
                            DType dtype, int tag) {
  const bool from_lane = communicators_.reduce_lane() != nullptr;  // which has written `out` already
  Transport* const ring = from_lane ? communicators_.leaders() : &communicators_.world();
  if (ring == nullptr || ring->size() == 1) return;
  operation.AddStage([=](const Operation&) {
    if (!from_lane && buffers->in != buffers->out)
      std::memcpy(buffers->out, buffers->in, buffers->count * SizeOf(dtype));
    return MakeRing(*ring, buffers->out, buffers->count, dtype, tag);
  });
}

// In no common order: the first rank of a host broadcasts in the order in which its rings end.
void MpiRoute::AddLaneBroadcastStage(Operation& operation,
                                     const std::shared_ptr<const ReduceBuffers>& buffers, DType dtype) {
  Lane* const lane = communicators_.broadcast_lane();
  if (lane == nullptr || topology().local_size == 1) return;
  operation.AddStage([=](const Operation& op) {
    return std::make_unique<LaneBroadcast>(*lane, counters_, LaneTagOf(op.what, op.sequence()), buffers->out,
                                           buffers->count * SizeOf(dtype), 0);
  });
}

std::unique_ptr<Collective> MpiRoute::MakeLaneReduce(LaneTag tag, const ReduceBuffers& buffers, DType dtype,
                                                     double scale, LaneReduce::Result result) {
  return std::make_unique<LaneReduce>(*communicators_.reduce_lane(), counters_, std::move(tag), buffers.in,
                                      buffers.out, buffers.count, dtype, scale, result);
}

}  // namespace hvpipe
