// Messages of device memory between two ranks: by NCCL where it joins all, or through the host and MPI.
#include <utility>

#include "core/engine.h"
#include "collectives/message.h"

namespace hvpipe {
namespace {

// What two ranks tell each other before they call NCCL: the sender how much it sends, the lower one of the
// two the message's turn and where NCCL finds it.
struct Words {
  std::uint64_t bytes;
  std::uint64_t turn;
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

// One end of a message.
struct Engine::DeviceMessage {
  DeviceMessage(DeviceSide& side, const MessageOptions& message_options, std::size_t message_bytes)
      : options(message_options),
        bytes(message_bytes),
        ended(OwnEvent(*side.device)),
        words{message_bytes, 0, {}} {}
  // What is enqueued from now on may use the array.
  void BeginBehind(DeviceSide& side, Device::Stream stream) {
    begun = OwnEvent(*side.device);
    side.device->Record(begun.get(), stream);
  }
  const MessageOptions options;
  const std::size_t bytes;
  Owned begun, ended;                     // begun: null where nothing was enqueued before
  std::shared_ptr<void> room, host_room;  // the engine's memory that it goes through
  // By NCCL:
  std::function<void(NcclCommunicator& ranks, int other, Device::Stream stream)> call;
  Words words;
  bool sends = false, gives_turns = false, called = false;
};

// Takes this rank's device for a message as soon as it is free and, on the higher rank, its turn has come.
bool Engine::TakeDevice(DeviceChannel& channel, DeviceMessage& message) {
  if (message.words.bytes != message.bytes) {
    throw Error("Both ends of a message should name its size. Received: rank " +
                    std::to_string(message.options.peer) + " sends " + std::to_string(message.words.bytes) +
                    " bytes, rank " + std::to_string(rank_) + " expects " + std::to_string(message.bytes),
                ErrorKind::kMismatch);
  }
  DeviceSide& side = *device_;
  if (side.sends_or_receives) return false;
  if (message.gives_turns) {
    if (channel.given == 0) channel.id = side.library->NewId();
    message.words.turn = channel.given++;
    message.words.id = channel.id;
  } else if (message.words.turn != channel.launched) {
    return false;
  }
  return side.sends_or_receives = true;
}

bool Engine::LaunchMessage(DeviceChannel& channel, DeviceMessage& message) {
  DeviceSide& side = *device_;
  const CurrentDevice current(*side.device);
  const int place = message.gives_turns ? 0 : 1;
  if (!channel.ranks) {
    auto ranks = std::make_unique<NcclCommunicator>(*side.library, place, 2, message.words.id);
    const std::lock_guard<std::mutex> lock(mutex_);  // for whoever aborts
    channel.ranks = std::move(ranks);
  }
  if (!channel.ranks->Ready()) return false;
  if (!std::exchange(message.called, true)) {
    if (message.bytes > 0) message.call(*channel.ranks, 1 - place, side.message_stream.get());
    if (!channel.ranks->Ready()) return false;
  }
  side.device->Record(message.ended.get(), side.message_stream.get());
  ++channel.launched;
  return true;
}

// A rank has one message at a time on its device, from when it takes the device to when the message has
// arrived, and the lower one of two ranks takes its device before the higher one does. So whoever waits for a
// device waits for a message that moves, or that waits for a higher rank's device; its data are made, and
// there is room for them. No two messages wait for each other in turn, in whatever order they come and
// however few streams make progress at once, and nothing on a device waits for what a rank is yet to compute.
// NCCL's user guide wants as much of whoever uses several communicators on a device.
//
//   lower    sends: hears that | takes the device, tells the turn | NCCL
//   higher   it is ready       |     hears it, takes the device   | NCCL
//
//   lower    is ready |             hears it, takes the device, tells the turn | NCCL
//   higher   sends: hears that, tells the bytes |  hears it, takes the device  | NCCL
void Engine::AddCrossing(Operation& operation, const std::shared_ptr<DeviceMessage>& message) {
  DeviceSide* const side = &device();
  DeviceChannel* channel = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    channel = &side->channels[message->options.peer];
  }
  message->gives_turns = rank_ < message->options.peer;
  OrderQueue* const order = MessageOrder(message->sends, message->options);
  // A receiver's words have a transport of their own: there may be a message of its own with that tag.
  Transport* const hears = message->sends ? side->words : messages_.get();
  Transport* const tells = message->sends ? messages_.get() : side->words;
  const auto add = [&](OrderQueue* in, std::function<std::unique_ptr<Collective>()> make) {
    operation.stages.push_back({[make = std::move(make)](const Operation&) { return make(); }, in, nullptr});
  };
  const auto hear = [=] {
    return std::make_unique<MessageReceive>(*hears, counters_, &message->words, sizeof(Words),
                                            message->options);
  };
  const auto tell = [=] {
    return std::make_unique<MessageSend>(*tells, counters_, &message->words, sizeof(Words), message->options);
  };
  const auto launch = [=] {
    return std::make_unique<DeviceLaunch>([=] { return LaunchMessage(*channel, *message); });
  };

  if (message->begun) AddArrival(operation, message->begun.get(), nullptr);
  add(order, [=]() -> std::unique_ptr<Collective> {
    if (message->sends) return std::make_unique<Readiness>(*hears, counters_, message->options);
    return std::make_unique<MessageSend>(*tells, counters_, nullptr, 0, message->options);
  });
  if (message->sends && !message->gives_turns) add(order, tell);
  if (!message->sends || !message->gives_turns) add(order, hear);
  add(nullptr, [=] {
    return std::make_unique<DeviceLaunch>([=] { return TakeDevice(*channel, *message); },
                                          "messages of this rank before it");
  });
  if (message->gives_turns) {
    add(order, [=] {
      std::vector<std::unique_ptr<Collective>> both;
      both.push_back(tell());
      both.push_back(launch());
      return std::make_unique<Together>(std::move(both));
    });
  } else {
    add(nullptr, launch);
  }
  add(nullptr, [=] {
    return std::make_unique<DeviceArrival>(*side->device, channel->ranks.get(), message->ended.get());
  });
  add(nullptr, [=] {
    return std::make_unique<DeviceLaunch>([=] {
      side->sends_or_receives = false;
      return true;
    });
  });
}

// On a stream that neither collectives nor copies the other way are on.
void Engine::AddMessageCopy(Operation& operation, const std::shared_ptr<DeviceMessage>& message,
                            Device::Stream stream, std::function<void(Device& device)> copy) {
  Device* const on = device().device.get();
  if (message->begun) AddArrival(operation, message->begun.get(), nullptr);
  const auto launch = [=] {
    copy(*on);
    on->Record(message->ended.get(), stream);
    return true;
  };
  operation.stages.push_back(
      {[=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); }, nullptr, nullptr});
  AddArrival(operation, message->ended.get(), nullptr);
}

// As long as messages are under way, this rank looks often for what comes.
void Engine::EnqueueMessage(const std::string& what, Done done,
                            const std::function<void(Operation& operation)>& add_stages) {
  const auto operation =
      MessageOperation("transfer", what, [count = awaited_, done = std::move(done)](const Error* error) {
        --*count;
        done(error);
      });
  add_stages(*operation);
  ++*awaited_;
  try {
    progress_->Enqueue({operation}, true);
  } catch (const Error&) {
    --*awaited_;
    throw;
  }
  progress_->StepOnce();
}

void Engine::SendDevice(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
                        Device::Stream stream, Done done) {
  DeviceSide& side = device();
  CheckIsHere(data, bytes);
  const auto message = std::make_shared<DeviceMessage>(side, MessageTo(peer, tag), bytes);
  message->BeginBehind(side, stream);
  message->sends = true;
  EnqueueMessage(what, std::move(done), [&](Operation& operation) {
    if (side.nccl_joins_all()) {
      message->call = [=](NcclCommunicator& ranks, int other, Device::Stream on) {
        ranks.Send(data, bytes, other, on);
      };
      return AddCrossing(operation, message);
    }
    message->host_room = side.host_rooms.Take(bytes);
    const Device::Stream down = side.download_stream.get();
    AddMessageCopy(operation, message, down,
                   [=](Device& device) { device.CopyToHost(message->host_room.get(), data, bytes, down); });
    operation.stages.push_back({[=](const Operation&) {
                                  return std::make_unique<MessageSend>(*messages_, counters_,
                                                                       message->host_room.get(), bytes,
                                                                       message->options);
                                },
                                MessageOrder(true, message->options), nullptr});
  });
}

void Engine::ReceiveBehind(const std::shared_ptr<DeviceMessage>& message, void* out, const std::string& what,
                           Done done) {
  DeviceSide& side = device();
  const std::size_t bytes = message->bytes;
  EnqueueMessage(what, std::move(done), [&](Operation& operation) {
    if (side.nccl_joins_all()) {
      message->call = [=](NcclCommunicator& ranks, int other, Device::Stream on) {
        ranks.Receive(out, bytes, other, on);
      };
      return AddCrossing(operation, message);
    }
    message->host_room = side.host_rooms.Take(bytes);
    operation.stages.push_back({[=](const Operation&) {
                                  return std::make_unique<MessageReceive>(*messages_, counters_,
                                                                          message->host_room.get(), bytes,
                                                                          message->options);
                                },
                                MessageOrder(false, message->options), nullptr});
    const Device::Stream up = side.upload_stream.get();
    AddMessageCopy(operation, message, up,
                   [=](Device& device) { device.CopyFromHost(out, message->host_room.get(), bytes, up); });
  });
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
  std::int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = next_posted_++;
    posted_[number] = {peer, tag, what, std::move(done), nullptr, 0};
  }
  // From here on an end tells it; what ended before does not.
  const std::optional<Error> error = stopped_ ? std::optional<Error>(ShutDown()) : progress_->error();
  if (error) {
    (void)Forget(number);
    throw *error;
  }
  return number;
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
  try {
    ReceiveBehind(message, message->room.get(), what, std::move(done));
  } catch (const Error&) {
    (void)Forget(number);
    throw;
  }
  return number;
}

std::optional<Engine::Posted> Engine::Forget(std::int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = posted_.find(number);
  if (found == posted_.end()) return std::nullopt;
  return std::move(posted_.extract(found).mapped());
}

Engine::Posted Engine::TakeNumber(std::int64_t number, bool receives) {
  std::optional<Posted> posted = Forget(number);
  if (posted && (posted->room != nullptr) == receives) return std::move(*posted);
  if (const auto error = progress_->error()) throw *error;
  throw Error("Unknown message. Received: number=" + std::to_string(number), ErrorKind::kUsage);
}

void Engine::SendPosted(std::int64_t number, const void* data, std::size_t bytes, Device::Stream stream,
                        std::shared_ptr<const void> held) {
  const Posted posted = TakeNumber(number, false);
  try {
    SendDevice(posted.peer, posted.tag, data, bytes, posted.what, stream,
               [done = posted.done, held = std::move(held)](const Error* error) { done(error); });
  } catch (const Error& error) {
    posted.done(&error);
    throw;
  }
}

void Engine::TakePosted(std::int64_t number, void* out, std::size_t count, DType dtype,
                        Device::Stream stream) {
  DeviceSide& side = device();
  const Posted posted = TakeNumber(number, true);
  CheckIsHere(out, count);
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
  AddArrival(*operation, read.get(), nullptr);
  operation->finished = [room = posted.room, read](const Error*) {};
  progress_->Enqueue({operation}, true);
}

// Nobody will give their arrays to them.
void Engine::EndPosted(const Error& error) {
  std::map<std::int64_t, Posted> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = posted_.begin(); it != posted_.end();) {
      const auto next = std::next(it);
      if (it->second.done) ended.insert(posted_.extract(it));
      it = next;
    }
  }
  for (const auto& [number, posted] : ended) posted.done(&error);
}

}  // namespace hvpipe
