// The stages of collectives of device memory: by NCCL, or through host memory.
#pragma once

#include <cstddef>
#include <functional>

#include "gpu/device_buffer.h"
#include "gpu/rank_device.h"
#include "progress/operation.h"
#include "progress/reduce.h"

namespace hvpipe {

// An all-reduce of device memory. It may begin after event `begun`, and is over at event `ended`.
struct DeviceReduce {
  const void* in;
  void* out;
  void* host;  // memory for it on the host; unused by NCCL
  std::size_t count;
  DType dtype;
  Device::Event begun, ended;
  int tag;
  DeviceBuffer* buffer = nullptr;  // of the bucket; null for a blocking call
};

// The all-reduce of a bucket, in place.
DeviceReduce ReduceOf(DeviceBuffer& buffer, DType dtype, int tag);

// Adds stages to operations. Has no state of its own, so make one wherever it is needed; any thread may. The
// stages run on the driving thread.
//
// clang-format off
//   NCCL connects    operation    stages
//   all ranks        all-reduce   NCCL's all-reduce | arrival
//                    scatter      NCCL's reduce-scatter
//                    gather       NCCL's all-gather
//   nothing          all-reduce   copy to the host | arrival | the stages of AllReduceRoute | copy back | arrival
// clang-format on
//
// Buckets are scattered and gathered, so that the gathers can have another order (DeAR: Zhang et al., ICDCS
// 2023).
class DeviceReducer {
 public:
  // Enqueues work on a stream: usually that of all collectives.
  using Enqueue = std::function<void(Device::Stream stream)>;

  DeviceReducer(RankDevice& device, AllReduceRoute& route) : device_(device), route_(route) {}

  // Whether the all-reduce of a bucket consists of a scatter and a gather.
  bool scatters() const { return device_.nccl_connects_all(); }
  void AddAllReduce(Operation& operation, const DeviceReduce& reduce);
  void AddScatter(Operation& operation, const DeviceReduce& reduce);
  // The operation ends when the gather was handed to the device; `ended` will then be reached.
  void AddGather(Operation& operation, const DeviceReduce& reduce, Device::Event ended);

  // Add a stage that calls NCCL in `call`, then runs `after`. NCCL's calls are handed to the device in one
  // order on all ranks.
  void AddNcclLaunch(Operation& operation, Device::Event begun, Enqueue call, Enqueue after);
  // The same, and a stage that waits until the device has run it.
  void AddNccl(Operation& operation, Device::Event begun, Device::Event ended, Enqueue call);
  // Add stages that run `copy`.
  void AddCopy(Operation& operation, Device::Stream stream, Device::Event begun, Device::Event ended,
               Enqueue copy);

 private:
  RankDevice& device_;
  AllReduceRoute& route_;
};

}  // namespace hvpipe
