// Messages of device memory between two ranks: by NCCL where it joins all, or through the host and MPI.
#include <utility>

#include "engine.h"
#include "message.h"

namespace hvpipe {
namespace {

// Of a sender that is about to send: when in its channel, what, and where NCCL finds it.
struct Promise {
  std::uint64_t turn;
  std::uint64_t bytes;
  nccl::UniqueId id;
};

// A receiver's word that it is ready.
class Readiness : public MessageReceive {
 public:
  Readiness(Transport& transport, Counters& counters, const MessageOptions& options)
      : MessageReceive(transport, counters, nullptr, 0, options), peer_(options.peer) {}
  std::string Waiting() const override {
    return "rank " + std::to_string(peer_) + " to receive it into device memory";
  }

 private:
  const int peer_;
};

}  // namespace

struct Engine::DeviceMessage {
  DeviceMessage(DeviceSide& side, const MessageOptions& message_options, std::size_t message_bytes)
      : options(message_options), bytes(message_bytes), ended(OwnEvent(*side.device)) {}
  // What is enqueued from now on may use the array.
  void BeginBehind(DeviceSide& side, Device::Stream stream) {
    begun = OwnEvent(*side.device);
    side.device->Record(begun.get(), stream);
  }
  const MessageOptions options;
  const std::size_t bytes;
  Owned begun, ended;  // begun: null where nothing was enqueued before
  std::shared_ptr<void> room, host_room;
  Promise promise{};
  bool called = false;
};

DeviceChannel& Engine::Channel(bool sends, int peer) {
  DeviceSide& side = device();
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceChannel& channel = side.channels[{sends, peer}];
  if (!channel.stream) channel.stream = OwnStream(*side.device);
  return channel;
}

// Both ends call NCCL only when both are ready, in the order in which the sender promised: so nothing on a
// device waits for what its rank is yet to compute, or to ask for.
//
//   receiver   the array is free | ready -->                 promise heard | in turn: NCCL | arrived
//   sender     the array is made           | heard, promise -->            | in turn: NCCL | arrived
void Engine::AddChannelSend(Operation& operation, const std::shared_ptr<DeviceMessage>& message,
                            const void* data) {
  DeviceSide& side = device();
  DeviceChannel& channel = Channel(true, message->options.peer);
  OrderQueue* const order = MessageOrder(true, message->options);
  AddArrival(operation, message->begun.get());
  operation.stages.push_back({[=, &side](const Operation&) {
                                return std::make_unique<Readiness>(*side.readiness, counters_,
                                                                   message->options);
                              },
                              order, nullptr});
  operation.stages.push_back({[=, &side, &channel](const Operation&) {
                                if (channel.promised == 0) channel.id = side.library->NewId();
                                message->promise = {channel.promised++, message->bytes, channel.id};
                                return std::make_unique<MessageSend>(*messages_, counters_, &message->promise,
                                                                     sizeof(Promise), message->options);
                              },
                              order, nullptr});
  AddChannelCall(operation, message, true, [=](NcclCommunicator& ranks, Device::Stream stream) {
    ranks.Send(data, message->bytes, 1, stream);
  });
}

void Engine::AddChannelReceive(Operation& operation, const std::shared_ptr<DeviceMessage>& message,
                               void* out) {
  DeviceSide& side = device();
  OrderQueue* const order = MessageOrder(false, message->options);
  if (message->begun) AddArrival(operation, message->begun.get());
  operation.stages.push_back({[=, &side](const Operation&) {
                                return std::make_unique<MessageSend>(*side.readiness, counters_, nullptr, 0,
                                                                     message->options);
                              },
                              order, nullptr});
  operation.stages.push_back({[=](const Operation&) {
                                return std::make_unique<MessageReceive>(*messages_, counters_,
                                                                        &message->promise, sizeof(Promise),
                                                                        message->options);
                              },
                              order, nullptr});
  AddChannelCall(operation, message, false, [=](NcclCommunicator& ranks, Device::Stream stream) {
    ranks.Receive(out, message->bytes, 0, stream);
  });
}

void Engine::AddChannelCall(Operation& operation, const std::shared_ptr<DeviceMessage>& message, bool sends,
                            std::function<void(NcclCommunicator& ranks, Device::Stream stream)> call) {
  DeviceSide* const side = &device();
  DeviceChannel* const channel = &Channel(sends, message->options.peer);
  const auto launch = [=] {
    if (message->promise.bytes != message->bytes) {
      throw Error("Both ends of a message should name its size. Received: rank " +
                      std::to_string(message->options.peer) + " sends " +
                      std::to_string(message->promise.bytes) + " bytes, rank " + std::to_string(rank_) +
                      " expects " + std::to_string(message->bytes),
                  ErrorKind::kMismatch);
    }
    if (channel->launched != message->promise.turn) return false;
    const CurrentDevice current(*side->device);
    if (!channel->ranks) {
      auto ranks = std::make_unique<NcclCommunicator>(*side->library, sends ? 0 : 1, 2, message->promise.id);
      const std::lock_guard<std::mutex> lock(mutex_);
      channel->ranks = std::move(ranks);
    }
    if (!channel->ranks->Ready()) return false;
    if (!std::exchange(message->called, true)) {
      if (message->bytes > 0) call(*channel->ranks, channel->stream.get());
      if (!channel->ranks->Ready()) return false;
    }
    side->device->Record(message->ended.get(), channel->stream.get());
    ++channel->launched;
    return true;
  };
  operation.stages.push_back(
      {[=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); }, nullptr, nullptr});
  operation.stages.push_back({[=](const Operation&) {
                                return std::make_unique<DeviceArrival>(*side->device, channel->ranks.get(),
                                                                       message->ended.get());
                              },
                              nullptr, nullptr});
}

void Engine::SendDevice(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
                        Device::Stream stream, Done done) {
  DeviceSide& side = device();
  CheckIsHere(data, bytes);
  const auto message = std::make_shared<DeviceMessage>(side, MessageTo(peer, tag), bytes);
  message->BeginBehind(side, stream);
  const auto operation = MessageOperation("transfer", what, std::move(done));
  if (side.nccl_joins_all()) {
    AddChannelSend(*operation, message, data);
  } else {
    message->host_room = side.host_rooms.Take(bytes);
    AddCopy(*operation, message->begun.get(), message->ended.get(), [=](DeviceSide& of, Device::Stream on) {
      of.device->CopyToHost(message->host_room.get(), data, bytes, on);
    });
    operation->stages.push_back({[=](const Operation&) {
                                   return std::make_unique<MessageSend>(*messages_, counters_,
                                                                        message->host_room.get(), bytes,
                                                                        message->options);
                                 },
                                 MessageOrder(true, message->options), nullptr});
  }
  progress_->Enqueue({operation}, true);
  progress_->StepOnce();
}

void Engine::ReceiveBehind(const std::shared_ptr<DeviceMessage>& message, void* out, const std::string& what,
                           Done done) {
  DeviceSide& side = device();
  const std::size_t bytes = message->bytes;
  const auto operation = MessageOperation("transfer", what, std::move(done));
  if (side.nccl_joins_all()) {
    AddChannelReceive(*operation, message, out);
  } else {
    message->host_room = side.host_rooms.Take(bytes);
    operation->stages.push_back({[=](const Operation&) {
                                   return std::make_unique<MessageReceive>(*messages_, counters_,
                                                                           message->host_room.get(), bytes,
                                                                           message->options);
                                 },
                                 MessageOrder(false, message->options), nullptr});
    AddCopy(*operation, message->begun.get(), message->ended.get(), [=](DeviceSide& of, Device::Stream on) {
      of.device->CopyFromHost(out, message->host_room.get(), bytes, on);
    });
  }
  progress_->Enqueue({operation}, true);
}

void Engine::ReceiveDevice(int peer, int tag, void* out, std::size_t bytes, const std::string& what,
                           Device::Stream stream, Done done) {
  CheckIsHere(out, bytes);
  const auto message = std::make_shared<DeviceMessage>(device(), MessageTo(peer, tag), bytes);
  message->BeginBehind(device(), stream);
  ReceiveBehind(message, out, what, std::move(done));
}

std::int64_t Engine::PostSend(int peer, int tag, const std::string& what, Done done) {
  (void)MessageTo(peer, tag);
  const std::lock_guard<std::mutex> lock(mutex_);
  posted_[next_posted_] = {peer, tag, what, std::move(done), nullptr, 0};
  return next_posted_++;
}

std::int64_t Engine::PostReceive(int peer, int tag, std::size_t bytes, const std::string& what, Done done) {
  DeviceSide& side = device();
  const auto message = std::make_shared<DeviceMessage>(side, MessageTo(peer, tag), bytes);
  message->room = side.rooms.Take(bytes);
  std::int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = next_posted_++;
    posted_[number] = {peer, tag, what, nullptr, message->room, bytes};
  }
  ReceiveBehind(message, message->room.get(), what, std::move(done));
  return number;
}

Engine::Posted Engine::TakeNumber(std::int64_t number, bool receives) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = posted_.find(number);
  if (found == posted_.end() || (found->second.room != nullptr) != receives) {
    throw Error("Unknown message. Received: number=" + std::to_string(number), ErrorKind::kUsage);
  }
  return std::move(posted_.extract(found).mapped());
}

void Engine::SendPosted(std::int64_t number, const void* data, std::size_t bytes, Device::Stream stream,
                        std::shared_ptr<const void> held) {
  Posted posted = TakeNumber(number, false);
  SendDevice(posted.peer, posted.tag, data, bytes, posted.what, stream,
             [done = std::move(posted.done), held = std::move(held)](const Error* error) { done(error); });
}

void Engine::TakePosted(std::int64_t number, void* out, std::size_t count, DType dtype,
                        Device::Stream stream) {
  DeviceSide& side = device();
  Posted posted = TakeNumber(number, true);
  if (posted.bytes != count * SizeOf(dtype)) {
    throw Error("A message should be taken as large as it is. Received: " + posted.what + " of " +
                    std::to_string(posted.bytes) + " bytes, taken as " +
                    std::to_string(count * SizeOf(dtype)),
                ErrorKind::kUsage);
  }
  side.device->Move({{posted.room.get(), out, count}}, dtype, dtype, 1.0, nullptr, stream);
  // Its room is for the next message when that is over.
  const std::shared_ptr<void> read = OwnEvent(*side.device);
  side.device->Record(read.get(), stream);
  auto operation = std::make_shared<Operation>();
  operation->what = "reading " + posted.what;
  operation->of_all_ranks = false;
  AddArrival(*operation, read.get());
  operation->finished = [room = std::move(posted.room), read](const Error*) {};
  progress_->Enqueue({operation}, true);
}

}  // namespace hvpipe
