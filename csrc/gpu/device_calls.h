// Blocking collectives of device memory. All ranks call them in the same order.
#pragma once

#include <string>

#include "gpu/device_reduce.h"
#include "gpu/rank_device.h"
#include "progress/blocking_calls.h"
#include "progress/messenger.h"
#include "progress/progress.h"
#include "progress/reduce.h"

namespace hvpipe {

// Threads: any thread may call, but the order of calls must be the same on all ranks. Calls take turns with
// those of BlockingCalls, because they share the events and the staging memory of the device.
class DeviceCalls {
 public:
  DeviceCalls(Progress& progress, BlockingCalls& calls, AllReduceRoute& route, DeviceSlot& device)
      : progress_(progress), calls_(calls), route_(route), device_(device) {}
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // out = scale * (sum of in over ranks), behind what is on `stream`. in may be out. Returns when the sum is
  // there.
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, double scale,
                 const std::string& what, Device::Stream stream, const Interrupt& interrupt);
  void Broadcast(void* data, std::size_t bytes, int root, const std::string& what, Device::Stream stream,
                 const Interrupt& interrupt);

 private:
  void RunOn(RankDevice& device, const std::string& what, const Interrupt& interrupt,
             const std::function<void(DeviceReducer& reducer, Operation& operation)>& add_stages);

  Progress& progress_;
  BlockingCalls& calls_;
  AllReduceRoute& route_;
  DeviceSlot& device_;
};

}  // namespace hvpipe
