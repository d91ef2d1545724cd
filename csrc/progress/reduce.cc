// Adds the stages of an all-reduce to an operation, by where its ranks are.
#include "progress/reduce.h"

#include <utility>

#include "base/vector_loops.h"
#include "collectives/control.h"
#include "collectives/mpi_all_reduce.h"
#include "collectives/segments.h"
#include "collectives/shared_memory_broadcast.h"
#include "collectives/shared_memory_gather.h"

namespace hvpipe {

OperationTag OperationTagOf(const std::string& what, std::uint64_t sequence) {
  return {Hash(what), sequence, what};
}

SharedWindow* AllReduceRoute::only_window() const {
  return topology().hosts == 1 ? network_.reduce_window() : nullptr;
}

Transport* AllReduceRoute::only_ring() const {
  const bool reduces_in_memory = network_.reduce_window() != nullptr;
  return reduces_in_memory || topology().size == 1 ? nullptr : &network_.ring();
}

void AllReduceRoute::AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers,
                               DType dtype, double scale, int tag) {
  const bool shared_alone = only_window() != nullptr;
  const bool sliced = !shared_alone && network_.reduce_window() != nullptr &&
                      network_.sums_slices(buffers->count * SizeOf(dtype));
  if (network_.reduce_window() != nullptr) {
    using Result = SharedMemoryReduce::Result;
    const auto result = shared_alone ? Result::kAll : sliced ? Result::kSlices : Result::kLeader;
    const double shared_scale = shared_alone ? scale : 1.0;
    operation.AddStage(
        [=](const Operation& op) {
          return MakeSharedReduce(OperationTagOf(op.what, op.sequence()), *buffers, dtype, shared_scale,
                                  result);
        },
        &shared_order_);
  }
  if (shared_alone) return;
  AddRingStage(operation, buffers, dtype, tag, sliced);
  AddSharedBackStage(operation, buffers, dtype, sliced);
  if (scale != 1.0) {
    auto previous = std::move(operation.check);
    operation.check = [=](Operation& op) {
      if (previous) previous(op);
      Scale(buffers->out, dtype, buffers->count, scale);
    };
  }
}

void AllReduceRoute::AddRingStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers,
                                  DType dtype, int tag, bool sliced) {
  const bool reduced_in_memory = network_.reduce_window() != nullptr;  // which has written `out` already
  Transport* const ring = reduced_in_memory ? network_.across() : &network_.ring();
  if (ring == nullptr || ring->size() == 1 || (!sliced && reduced_in_memory && topology().local_rank > 0))
    return;
  const std::size_t element = SizeOf(dtype), ranks = static_cast<std::size_t>(topology().local_size);
  const auto part = [=, rank = static_cast<std::size_t>(topology().local_rank)] {
    return sliced ? SplitEvenly(buffers->count, ranks, rank) : Range{0, buffers->count};
  };
  // Of a table the count is not known yet.
  MpiSums* const sums = buffers->count == 0 ? nullptr : network_.SumsFor(*ring, part().count * element);
  operation.AddStage(
      [=](const Operation&) -> std::unique_ptr<Collective> {
        const Range own = part();
        void* const out = static_cast<char*>(buffers->out) + own.first * element;
        const void* const in = reduced_in_memory ? out : buffers->in;
        if (sums != nullptr)
          return std::make_unique<MpiAllReduce>(*sums, counters_, ring->size(), in, out, own.count, dtype);
        return MakeAllReduce(*ring, in, out, own.count, dtype, tag);
      },
      sums == nullptr ? nullptr : &mpi_order_);
}

// In no common order: the first rank of a host goes by the order in which its rings end, and the others
// follow.
void AllReduceRoute::AddSharedBackStage(Operation& operation,
                                        const std::shared_ptr<const ReduceBuffers>& buffers, DType dtype,
                                        bool sliced) {
  SharedWindow* const window = network_.broadcast_window();
  if (window == nullptr || topology().local_size == 1) return;
  operation.AddStage([=](const Operation& op) -> std::unique_ptr<Collective> {
    auto tag = OperationTagOf(op.what, op.sequence());
    if (sliced)
      return std::make_unique<SharedMemoryGather>(*window, counters_, std::move(tag), buffers->out,
                                                  buffers->count, SizeOf(dtype));
    return std::make_unique<SharedMemoryBroadcast>(*window, counters_, std::move(tag), buffers->out,
                                                   buffers->count * SizeOf(dtype), 0);
  });
}

std::unique_ptr<Collective> AllReduceRoute::MakeSharedReduce(OperationTag tag, const ReduceBuffers& buffers,
                                                             DType dtype, double scale,
                                                             SharedMemoryReduce::Result result) {
  return std::make_unique<SharedMemoryReduce>(*network_.reduce_window(), counters_, std::move(tag),
                                              buffers.in, buffers.out, buffers.count, dtype, scale, result);
}

}  // namespace hvpipe
