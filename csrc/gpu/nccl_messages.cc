// The handshake of two ranks before a message by NCCL, and its launch.
#include "gpu/nccl_messages.h"

#include <string>
#include <utility>
#include <vector>

#include "gpu/device_stages.h"

namespace hvpipe {
namespace {

// The receiver's signal that it is ready.
class ReadySignal : public MessageReceive {
 public:
  ReadySignal(Transport& transport, Counters& counters, const MessageOptions& options)
      : MessageReceive(transport, counters, nullptr, 0, options), peer_(options.peer) {}
  std::string Waiting() const override {
    return "rank " + std::to_string(peer_) + " to receive it into device memory";
  }

 private:
  const int peer_;
};

// Take this rank's device for a message if it is free and, on the higher rank, if the message is the next
// one. The lower rank numbers the message. Returns whether the device was taken.
bool TakeDevice(RankDevice& device, int rank, PeerChannel& channel, DeviceMessage& message) {
  MessageHandshake& handshake = message.handshake;
  if (handshake.bytes != message.bytes) {
    throw Error("Both ends of a message should give the same size. Received: rank " +
                    std::to_string(message.options.peer) + " sends " + std::to_string(handshake.bytes) +
                    " bytes, rank " + std::to_string(rank) + " expects " + std::to_string(message.bytes),
                ErrorKind::kMismatch);
  }
  const bool next = message.numbers || handshake.number == channel.launched;
  if (!next || !device.Take()) return false;
  if (message.numbers) {
    const CurrentDevice current(*device.device);
    if (channel.numbered == 0) channel.id = device.library->NewId();
    handshake.number = channel.numbered++;
    handshake.id = channel.id;
  }
  return true;
}

// Returns whether NCCL has launched the message.
bool LaunchMessage(RankDevice& device, PeerChannel& channel, DeviceMessage& message) {
  const CurrentDevice current(*device.device);
  const int place = message.numbers ? 0 : 1;
  if (!channel.ranks) {
    device.Connect(channel, std::make_unique<NcclCommunicator>(*device.library, device.device, place, 2,
                                                               message.handshake.id));
  }
  if (!channel.ranks->Ready()) return false;
  const Device::Stream stream = device.message_stream.get();
  if (!std::exchange(message.called, true)) {
    if (message.bytes > 0) message.call(*channel.ranks, 1 - place, stream);
    if (!channel.ranks->ReadySoon()) return false;
  }
  device.device->Record(message.ended.get(), stream);
  ++channel.launched;
  return true;
}

}  // namespace

// Receivers' signals have a transport of their own: the receiver may send a message with the same tag.
Transport& NcclMessages::Hears(const DeviceMessage& message) const {
  return message.sends ? *device_.ready_signals : network_.messages();
}

Transport& NcclMessages::Tells(const DeviceMessage& message) const {
  return message.sends ? network_.messages() : *device_.ready_signals;
}

Operation::MakeCollective NcclMessages::Hear(const std::shared_ptr<DeviceMessage>& message) const {
  return [=, &from = Hears(*message), &counters = counters_](const Operation&) {
    return std::make_unique<MessageReceive>(from, counters, &message->handshake, sizeof(MessageHandshake),
                                            message->options);
  };
}

Operation::MakeCollective NcclMessages::Tell(const std::shared_ptr<DeviceMessage>& message) const {
  return [=, &to = Tells(*message), &counters = counters_](const Operation&) {
    return std::make_unique<MessageSend>(to, counters, &message->handshake, sizeof(MessageHandshake),
                                         message->options);
  };
}

void NcclMessages::AddStages(Operation& operation, const std::shared_ptr<DeviceMessage>& message) {
  message->numbers = network_.topology().rank < message->options.peer;
  OrderQueue* const order = messenger_.OrderOf(message->sends, message->options);
  if (message->begun) AddArrival(operation, *device_.device, nullptr, message->begun.get());
  AddReadiness(operation, message, order);
  AddTransfer(operation, message, order);
}

void NcclMessages::AddReadiness(Operation& operation, const std::shared_ptr<DeviceMessage>& message,
                                OrderQueue* order) {
  if (message->sends) {
    operation.AddStage(
        [=, &from = Hears(*message), &counters = counters_](const Operation&) {
          return std::make_unique<ReadySignal>(from, counters, message->options);
        },
        order);
    if (!message->numbers) operation.AddStage(Tell(message), order);
  } else {
    operation.AddStage(
        [=, &to = Tells(*message), &counters = counters_](const Operation&) {
          return std::make_unique<MessageSend>(to, counters, nullptr, 0, message->options);
        },
        order);
  }
  if (!message->sends || !message->numbers) operation.AddStage(Hear(message), order);
}

void NcclMessages::AddTransfer(Operation& operation, const std::shared_ptr<DeviceMessage>& message,
                               OrderQueue* order) {
  RankDevice* const device = &device_;
  PeerChannel* const channel = &device->ChannelTo(message->options.peer);
  const int rank = network_.topology().rank;
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceLaunch>([=] { return TakeDevice(*device, rank, *channel, *message); },
                                          "an earlier message or sum of this rank");
  });
  const Operation::MakeCollective launch = [=](const Operation&) {
    return std::make_unique<DeviceLaunch>([=] { return LaunchMessage(*device, *channel, *message); });
  };
  if (message->numbers) {
    operation.AddStage(
        [launch, tell = Tell(message)](const Operation& op) {
          std::vector<std::unique_ptr<Collective>> both;
          both.push_back(tell(op));
          both.push_back(launch(op));
          return std::make_unique<ConcurrentCollectives>(std::move(both));
        },
        order);
  } else {
    operation.AddStage(launch);
  }
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceArrival>(*device->device, channel->ranks.get(), message->ended.get());
  });
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceLaunch>([=] {
      device->Release();
      return true;
    });
  });
}

}  // namespace hvpipe
