// Messages of device memory by NCCL, one at a time on each device.
#pragma once

#include <functional>
#include <memory>

#include "base/telemetry.h"
#include "gpu/device_message.h"
#include "gpu/rank_device.h"
#include "progress/messenger.h"
#include "progress/network.h"
#include "progress/operation.h"

namespace hvpipe {

// Adds the stages of a message to its operation. Has no state of its own, so make one wherever it is needed;
// any thread may. The stages run on the driving thread.
//
// A rank has one message, or one sum of a group (see GroupReducer), at a time on its device: from taking the
// device until the message has arrived. Of two ranks, the lower one takes its device first. So a rank that
// waits for a device waits for a message that makes progress, or for the device of a higher rank. Messages
// take a device only when their data exist and there is memory for them. Therefore no messages wait for each
// other in a circle, in whatever order they come and however few streams make progress at once, and nothing
// on a device waits for something that a rank has yet to compute. NCCL's user guide requires this of programs
// that use several communicators on a device.
//
//   lower    sends: hears that the  | takes the device, tells the number | NCCL
//   higher   receiver is ready      | hears it, takes the device         | NCCL
//
//   lower    is ready to receive                   | hears it, takes the device, tells the number | NCCL
//   higher   sends: hears that, tells the bytes    | hears it, takes the device                   | NCCL
class NcclMessages {
 public:
  NcclMessages(RankDevice& device, Network& network, Messenger& messenger, Counters& counters)
      : device_(device), network_(network), messenger_(messenger), counters_(counters) {}
  void AddStages(Operation& operation, const std::shared_ptr<DeviceMessage>& message);

 private:
  void AddReadiness(Operation& operation, const std::shared_ptr<DeviceMessage>& message, OrderQueue* order);
  void AddTransfer(Operation& operation, const std::shared_ptr<DeviceMessage>& message, OrderQueue* order);
  Transport& Hears(const DeviceMessage& message) const;
  Transport& Tells(const DeviceMessage& message) const;
  Operation::MakeCollective Hear(const std::shared_ptr<DeviceMessage>& message) const;
  Operation::MakeCollective Tell(const std::shared_ptr<DeviceMessage>& message) const;

  RankDevice& device_;
  Network& network_;
  Messenger& messenger_;
  Counters& counters_;
};

}  // namespace hvpipe
