// One end of a message of device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "collectives/message.h"
#include "gpu/device_memory.h"
#include "gpu/nccl.h"
#include "gpu/rank_device.h"

namespace hvpipe {

// What two ranks tell each other before they call NCCL: the sender how many bytes it sends, the lower rank
// the number of the message and the address of their communicator.
struct MessageHandshake {
  std::uint64_t bytes;
  std::uint64_t number;
  nccl::UniqueId id;
};

// Shared by the stages of its operation. After it is enqueued only the driving thread uses it.
struct DeviceMessage {
  DeviceMessage(RankDevice& device, const MessageOptions& message_options, std::size_t message_bytes)
      : options(message_options),
        bytes(message_bytes),
        ended(OwnedEvent(*device.device)),
        handshake{message_bytes, 0, {}} {}
  // Let the message begin after the work that is on `stream` now.
  void BeginBehind(RankDevice& device, Device::Stream stream) {
    begun = OwnedEvent(*device.device);
    device.device->Record(begun.get(), stream);
  }

  const MessageOptions options;
  const std::size_t bytes;
  OwnedHandle begun, ended;                          // begun: null if the message waits for no work
  std::shared_ptr<void> device_memory, host_memory;  // of the engine, where the message passes through them

  // With NCCL only:
  std::function<void(NcclCommunicator& ranks, int peer, Device::Stream stream)> call;
  MessageHandshake handshake;
  bool sends = false;    // else it receives
  bool numbers = false;  // this rank is the lower one of the two
  bool called = false;
};

}  // namespace hvpipe
