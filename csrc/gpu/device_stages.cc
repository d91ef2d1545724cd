// Waits for a device without blocking.
#include "gpu/device_stages.h"

#include <memory>

namespace hvpipe {

bool DeviceArrival::Step() {
  if (ranks_ != nullptr) (void)ranks_->Ready();
  return done_ = device_.Reached(event_);
}

std::string DeviceArrival::Waiting() const {
  return device_.Name() + " to finish what was handed to it" +
         (ranks_ != nullptr ? " (NCCL waits for all " + std::to_string(ranks_->size()) + " ranks)" : "");
}

void AddCopy(Operation& operation, Device& device, Device::Event begun, Device::Event ended,
             Device::Stream stream, std::function<void(Device& device)> copy) {
  if (begun != nullptr) AddArrival(operation, device, nullptr, begun);
  const auto launch = [=, on = &device] {
    copy(*on);
    on->Record(ended, stream);
    return true;
  };
  operation.AddStage([=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); });
  AddArrival(operation, device, nullptr, ended);
}

void AddArrival(Operation& operation, Device& device, NcclCommunicator* ranks, Device::Event event,
                OrderQueue* order) {
  operation.AddStage([&device, ranks, event](
                         const Operation&) { return std::make_unique<DeviceArrival>(device, ranks, event); },
                     order);
}

}  // namespace hvpipe
