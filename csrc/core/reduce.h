// The route of an all-reduce of host memory; over MPI: ring, shared-memory window, or both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "collectives/shared_memory_reduce.h"
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

// How all-reduces of all ranks travel. Adds the collectives that serve them to operations.
//
// Threads: any thread may add stages. Only the driving thread touches order queues. No lock.
class AllReduceRoute {
 public:
  explicit AllReduceRoute(const Topology& topology) : topology_(topology) {}
  virtual ~AllReduceRoute() = default;
  AllReduceRoute(const AllReduceRoute&) = delete;
  AllReduceRoute& operator=(const AllReduceRoute&) = delete;

  const Topology& topology() const { return topology_; }

  // Add the stages of out = scale * (sum of in over all ranks).
  virtual void AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                         double scale, int tag) = 0;

  // The window, if it alone serves all ranks; else null.
  virtual SharedWindow* only_window() const { return nullptr; }
  // A single collective in the window. Only if there is one.
  virtual std::unique_ptr<Collective> MakeSharedReduce(OperationTag tag, const ReduceBuffers& buffers,
                                                       DType dtype, double scale,
                                                       SharedMemoryReduce::Result result);
  // A single ring among `ranks`, in place. Only over MPI.
  virtual std::unique_ptr<Collective> MakeRing(Transport& ranks, void* data, std::size_t count, DType dtype,
                                               int tag);

  // The ring, if it alone serves all ranks, of which there are several; else null.
  virtual Transport* only_ring() const { return nullptr; }
  // An all-gather of equal chunks in that ring; chunk r is of rank r.
  virtual std::unique_ptr<Collective> MakeGather(void* data, std::size_t count, DType dtype, int tag);

 private:
  const Topology topology_;
};

// Over MPI. All ranks of a host choose alike, because the choice depends only on the topology and on whether
// shared memory is used.
//
//   ranks                     stages
//   all on one host           window
//   one on each host          ring
//   several on some hosts     window to the first rank of the host | ring of the first ranks | window back
class MpiRoute : public AllReduceRoute {
 public:
  MpiRoute(Communicators& communicators, Counters& counters)
      : AllReduceRoute(communicators.topology()), communicators_(communicators), counters_(counters) {}

  void AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                 double scale, int tag) override;
  SharedWindow* only_window() const override;
  std::unique_ptr<Collective> MakeSharedReduce(OperationTag tag, const ReduceBuffers& buffers, DType dtype,
                                               double scale, SharedMemoryReduce::Result result) override;
  std::unique_ptr<Collective> MakeRing(Transport& ranks, void* data, std::size_t count, DType dtype,
                                       int tag) override {
    return communicators_.MakeRing(ranks, data, count, dtype, tag);
  }
  Transport* only_ring() const override;
  std::unique_ptr<Collective> MakeGather(void* data, std::size_t count, DType dtype, int tag) override {
    return communicators_.MakeRing(communicators_.world(), data, count, dtype, tag, true);
  }

 private:
  void AddRingStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers, DType dtype,
                    int tag);
  void AddSharedBroadcastStage(Operation& operation, const std::shared_ptr<const ReduceBuffers>& buffers,
                               DType dtype);

  Communicators& communicators_;
  Counters& counters_;
  OrderQueue shared_order_;
};

// The identity of an operation in the window.
OperationTag OperationTagOf(const std::string& what, std::uint64_t sequence);

}  // namespace hvpipe
