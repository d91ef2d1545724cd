// Starts messages of device memory, and hands out posted ones.
#include "gpu/device_messenger.h"

#include <optional>
#include <utility>

#include "gpu/device_stages.h"
#include "gpu/nccl_messages.h"

namespace hvpipe {

// The operation counts as awaited while it is under way, so that the progress thread looks often for what
// comes.
void DeviceMessenger::Enqueue(const char* category, const std::string& what, Done done,
                              const AddStages& add_stages) {
  const auto operation = Messenger::MakeOperation(
      category, what, [count = messenger_.awaited(), done = std::move(done)](const Error* error) {
        --*count;
        done(error);
      });
  add_stages(*operation);
  ++*messenger_.awaited();
  try {
    progress_.Enqueue({operation}, true);
  } catch (...) {
    --*messenger_.awaited();
    throw;
  }
  progress_.StepOnce();
}

void DeviceMessenger::Send(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
                           Device::Stream stream, Done done) {
  RankDevice& device = device_.get();
  device.CheckIsHere(data, bytes);
  const auto message = std::make_shared<DeviceMessage>(device, messenger_.OptionsFor(peer, tag), bytes);
  message->BeginBehind(device, stream);
  message->sends = true;
  Enqueue("transfer", what, std::move(done), [&](Operation& operation) {
    if (device.messages_by_nccl()) {
      message->call = [=](NcclCommunicator& ranks, int other, Device::Stream on) {
        ranks.Send(data, bytes, other, on);
      };
      return NcclMessages(device, network_, messenger_, counters_).AddStages(operation, message);
    }
    message->host_memory = device.host_pool.Take(bytes);
    const Device::Stream down = device.download_stream.get();
    AddCopy(operation, *device.device, message->begun.get(), message->ended.get(), down,
            [=](Device& on) { on.CopyToHost(message->host_memory.get(), data, bytes, down); });
    operation.AddStage(
        [=](const Operation&) {
          return network_.MakeSend(message->host_memory.get(), bytes, message->options);
        },
        messenger_.OrderOf(true, message->options));
  });
}

void DeviceMessenger::ReceiveInto(RankDevice& device, const std::shared_ptr<DeviceMessage>& message,
                                  void* out, const std::string& what, Done done) {
  const std::size_t bytes = message->bytes;
  Enqueue("transfer", what, std::move(done), [&](Operation& operation) {
    if (device.messages_by_nccl()) {
      message->call = [=](NcclCommunicator& ranks, int other, Device::Stream on) {
        ranks.Receive(out, bytes, other, on);
      };
      return NcclMessages(device, network_, messenger_, counters_).AddStages(operation, message);
    }
    message->host_memory = device.host_pool.Take(bytes);
    operation.AddStage(
        [=](const Operation&) {
          return network_.MakeReceive(message->host_memory.get(), bytes, message->options);
        },
        messenger_.OrderOf(false, message->options));
    const Device::Stream up = device.upload_stream.get();
    AddCopy(operation, *device.device, message->begun.get(), message->ended.get(), up,
            [=](Device& on) { on.CopyFromHost(out, message->host_memory.get(), bytes, up); });
  });
}

void DeviceMessenger::Receive(int peer, int tag, void* out, std::size_t bytes, const std::string& what,
                              Device::Stream stream, Done done) {
  RankDevice& device = device_.get();
  device.CheckIsHere(out, bytes);
  const auto message = std::make_shared<DeviceMessage>(device, messenger_.OptionsFor(peer, tag), bytes);
  message->BeginBehind(device, stream);
  ReceiveInto(device, message, out, what, std::move(done));
}

std::int64_t DeviceMessenger::PostSend(int peer, int tag, const std::string& what, Done done) {
  (void)messenger_.OptionsFor(peer, tag);
  return AddSend({peer, tag, what, std::move(done), nullptr, 0, nullptr});
}

std::int64_t DeviceMessenger::PostGroupReduce(int group, std::size_t count, DType dtype,
                                              const std::string& what, Done done) {
  auto reduce = std::make_shared<GroupReduce>(device_.get(), group, messenger_.NextCall(group), count, dtype);
  return AddSend({0, 0, what, std::move(done), nullptr, 0, std::move(reduce)});
}

std::int64_t DeviceMessenger::AddSend(PostedMessage message) {
  const std::int64_t number = posted_.Add(std::move(message));
  // Check only now: an error from here on reaches the message by EndPosted, one from before does not.
  if (const std::optional<Error> error = progress_.refusal()) {
    (void)posted_.Take(number);
    throw *error;
  }
  return number;
}

std::int64_t DeviceMessenger::PostReceive(int peer, int tag, std::size_t bytes, const std::string& what,
                                          Done done) {
  RankDevice& device = device_.get();
  const auto message = std::make_shared<DeviceMessage>(device, messenger_.OptionsFor(peer, tag), bytes);
  message->device_memory = device.device_pool.Take(bytes);
  const std::int64_t number = posted_.Add({peer, tag, what, nullptr, message->device_memory, bytes, nullptr});
  try {
    ReceiveInto(device, message, message->device_memory.get(), what, std::move(done));
  } catch (...) {
    (void)posted_.Take(number);
    throw;
  }
  return number;
}

PostedMessage DeviceMessenger::TakeNumber(std::int64_t number, bool receives) {
  std::optional<PostedMessage> posted = posted_.Take(number);
  if (posted && posted->receives() == receives) return std::move(*posted);
  if (const auto error = progress_.error()) throw *error;
  throw Error("Unknown message. Received: number=" + std::to_string(number), ErrorKind::kUsage);
}

void DeviceMessenger::SendPosted(std::int64_t number, const void* data, std::size_t bytes,
                                 Device::Stream stream, std::shared_ptr<const void> held) {
  const PostedMessage posted = TakeNumber(number, false);
  try {
    if (posted.reduce) return SendSummand(number, posted, data, bytes, stream, std::move(held));
    Send(posted.peer, posted.tag, data, bytes, posted.what, stream,
         [done = posted.done, held = std::move(held)](const Error* error) { done(error); });
  } catch (const std::exception& failure) {
    const Error error = ErrorOf(failure);
    posted.done(&error);
    throw error;
  }
}

void DeviceMessenger::SendSummand(std::int64_t number, const PostedMessage& posted, const void* data,
                                  std::size_t bytes, Device::Stream stream,
                                  std::shared_ptr<const void> held) {
  RankDevice& device = device_.get();
  const std::shared_ptr<GroupReduce>& reduce = posted.reduce;
  device.CheckIsHere(data, bytes);
  if (bytes != reduce->bytes()) {
    throw Error("A sum should get an array of the size that was posted. Received: " + posted.what + " of " +
                    std::to_string(reduce->bytes()) + " bytes, and an array of " + std::to_string(bytes),
                ErrorKind::kUsage);
  }
  device.device->ScaleAndCast({{data, reduce->memory.get(), reduce->count}}, reduce->dtype, reduce->dtype,
                              1.0, stream);
  device.device->Record(reduce->begun.get(), stream);
  reduce->copied_from = std::move(held);
  posted_.AddAs(number, {0, 0, posted.what, nullptr, reduce->memory, bytes, nullptr});
  try {
    Enqueue("reduce", posted.what, posted.done, [&](Operation& operation) {
      GroupReducer(device, network_, messenger_, counters_).AddStages(operation, reduce);
    });
  } catch (...) {
    (void)posted_.Take(number);
    throw;
  }
}

void DeviceMessenger::TakePosted(std::int64_t number, void* out, std::size_t count, DType dtype,
                                 Device::Stream stream) {
  RankDevice& device = device_.get();
  const PostedMessage posted = TakeNumber(number, true);
  device.CheckIsHere(out, count);
  if (posted.bytes != count * SizeOf(dtype)) {
    throw Error("A message should be taken with its full size. Received: " + posted.what + " of " +
                    std::to_string(posted.bytes) + " bytes, taken as " +
                    std::to_string(count * SizeOf(dtype)),
                ErrorKind::kUsage);
  }
  device.device->ScaleAndCast({{posted.memory.get(), out, count}}, dtype, dtype, 1.0, stream);
  // When the device has read the memory, it goes back to the pool.
  const std::shared_ptr<void> read = OwnedEvent(*device.device);
  device.device->Record(read.get(), stream);
  HoldUntil(read, posted.memory, "reading " + posted.what);
}

void DeviceMessenger::HoldUntil(std::shared_ptr<void> event, std::shared_ptr<const void> held,
                                const std::string& what) {
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->of_all_ranks = false;
  AddArrival(*operation, *device_.get().device, nullptr, event.get());
  operation->finished = [event, held](const Error*) {};
  progress_.Enqueue({operation}, true);
}

}  // namespace hvpipe
