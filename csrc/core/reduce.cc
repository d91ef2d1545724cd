// Adds the stages of an all-reduce to an operation, by where its ranks are.
#include "core/reduce.h"

#include <cstring>
#include <utility>

#include "collectives/control.h"
#include "collectives/shared_memory_broadcast.h"
#include "core/vector_loops.h"

namespace hvpipe {

std::unique_ptr<Collective> AllReduceRoute::MakeSharedReduce(OperationTag /*tag*/,
                                                             const ReduceBuffers& /*buffers*/,
                                                             DType /*dtype*/, double /*scale*/,
                                                             SharedMemoryReduce::Result /*result*/) {
  throw Error("An all-reduce in shared memory needs MPI", ErrorKind::kUsage);
}

std::unique_ptr<Collective> AllReduceRoute::MakeRing(Transport& /*ranks*/, void* /*data*/,
                                                     std::size_t /*count*/, DType /*dtype*/, int /*tag*/) {
  throw Error("A ring needs MPI", ErrorKind::kUsage);
}

std::unique_ptr<Collective> AllReduceRoute::MakeGather(void* /*data*/, std::size_t /*count*/, DType /*dtype*/,
                                                       int /*tag*/) {
  throw Error("A ring needs MPI", ErrorKind::kUsage);
}

OperationTag OperationTagOf(const std::string& what, std::uint64_t sequence) {
  return {Hash(what), sequence, what};
}

SharedWindow* MpiRoute::only_window() const {
  return topology().hosts == 1 ? communicators_.reduce_window() : nullptr;
}

Transport* MpiRoute::only_ring() const {
  const bool reduces_in_memory = communicators_.reduce_window() != nullptr;
  return reduces_in_memory || topology().size == 1 ? nullptr : &communicators_.world();
}

void MpiRoute::AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                         double scale, int tag) {
  const bool shared_alone = only_window() != nullptr;
  if (communicators_.reduce_window() != nullptr) {
    const auto result = shared_alone ? SharedMemoryReduce::Result::kAll : SharedMemoryReduce::Result::kLeader;
    const double shared_scale = shared_alone ? scale : 1.0;
    operation.AddStage(
        [=](const Operation& op) {
          return MakeSharedReduce(OperationTagOf(op.what, op.sequence()), *buffers, dtype, shared_scale,
                                  result);
        },
        &shared_order_);
  }
  if (shared_alone) return;
  AddRingStage(operation, buffers, dtype, tag);
  AddSharedBroadcastStage(operation, buffers, dtype);
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
  const bool reduced_in_memory =
      communicators_.reduce_window() != nullptr;  // which has written `out` already
  Transport* const ring = reduced_in_memory ? communicators_.leaders() : &communicators_.world();
  if (ring == nullptr || ring->size() == 1) return;
  operation.AddStage([=](const Operation&) {
    if (!reduced_in_memory && buffers->in != buffers->out)
      std::memcpy(buffers->out, buffers->in, buffers->count * SizeOf(dtype));
    return MakeRing(*ring, buffers->out, buffers->count, dtype, tag);
  });
}

// In no common order: the first rank of a host broadcasts in the order in which its rings end.
void MpiRoute::AddSharedBroadcastStage(Operation& operation,
                                       const std::shared_ptr<const ReduceBuffers>& buffers, DType dtype) {
  SharedWindow* const window = communicators_.broadcast_window();
  if (window == nullptr || topology().local_size == 1) return;
  operation.AddStage([=](const Operation& op) {
    return std::make_unique<SharedMemoryBroadcast>(*window, counters_, OperationTagOf(op.what, op.sequence()),
                                                   buffers->out, buffers->count * SizeOf(dtype), 0);
  });
}

std::unique_ptr<Collective> MpiRoute::MakeSharedReduce(OperationTag tag, const ReduceBuffers& buffers,
                                                       DType dtype, double scale,
                                                       SharedMemoryReduce::Result result) {
  return std::make_unique<SharedMemoryReduce>(*communicators_.reduce_window(), counters_, std::move(tag),
                                              buffers.in, buffers.out, buffers.count, dtype, scale, result);
}

}  // namespace hvpipe
