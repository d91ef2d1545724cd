// The two stages of work on a device: it is launched, then the device has finished it.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "collectives/collective.h"
#include "gpu/device.h"
#include "gpu/nccl.h"
#include "progress/operation.h"

namespace hvpipe {

// A device is much faster than a network: a longer sleep would leave it idle.
constexpr double kDeviceNapS = 20e-6;

// Done once `launch` returns true: everything was handed to the device. Does not wait until the device has
// run it.
class DeviceLaunch : public Collective {
 public:
  explicit DeviceLaunch(std::function<bool()> launch, const char* waiting = "NCCL to start it")
      : launch_(std::move(launch)), waiting_(waiting) {}
  bool Step() override { return done_ = launch_(); }
  bool done() const override { return done_; }
  std::string Waiting() const override { return waiting_; }
  double MostNapS() const override { return kDeviceNapS; }

 private:
  std::function<bool()> launch_;
  const char* const waiting_;
  bool done_ = false;
};

// Done when the device has reached `event`. Throws an error that NCCL finds meanwhile in `ranks` (may be
// null).
class DeviceArrival : public Collective {
 public:
  DeviceArrival(Device& device, NcclCommunicator* ranks, Device::Event event)
      : device_(device), ranks_(ranks), event_(event) {}
  bool Step() override;
  bool done() const override { return done_; }
  std::string Waiting() const override;
  double MostNapS() const override { return kDeviceNapS; }

 private:
  Device& device_;
  NcclCommunicator* const ranks_;
  Device::Event event_;
  bool done_ = false;
};

// Append a copy between the device and host memory on `stream`, which records `ended` behind it. It is
// launched once the device has reached `begun` (null: at once), so it delays no other copy of the stream.
void AddCopy(Operation& operation, Device& device, Device::Event begun, Device::Event ended,
             Device::Stream stream, std::function<void(Device& device)> copy);

// Append a stage that waits until the device has reached `event`. `ranks`: the communicator that the event
// may have to wait for; null if none. `order`: events of one stream, reached in this order.
void AddArrival(Operation& operation, Device& device, NcclCommunicator* ranks, Device::Event event,
                OrderQueue* order = nullptr);

}  // namespace hvpipe
