// Messages of device memory between two ranks, and sums among some: by NCCL if it connects all ranks and may
// have several communicators, else through host memory and MPI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "gpu/device_message.h"
#include "gpu/posted_messages.h"
#include "gpu/rank_device.h"
#include "progress/messenger.h"
#include "progress/network.h"
#include "progress/progress.h"

namespace hvpipe {

// No call waits. Memory is read and written after the work that is on `stream` at the time of the call.
// Received data are visible to all streams when `done` is called. If NCCL carries messages, both ends must
// use device memory.
//
// Threads: any thread may call. The posted messages have a lock of their own.
class DeviceMessenger {
 public:
  DeviceMessenger(Progress& progress, Network& network, Messenger& messenger, DeviceSlot& device,
                  Counters& counters)
      : progress_(progress), network_(network), messenger_(messenger), device_(device), counters_(counters) {}
  DeviceMessenger(const DeviceMessenger&) = delete;
  DeviceMessenger& operator=(const DeviceMessenger&) = delete;

  void Send(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
            Device::Stream stream, Done done);
  void Receive(int peer, int tag, void* out, std::size_t bytes, const std::string& what,
               Device::Stream stream, Done done);

  // The same in two calls, for arrays that exist only later. The first call returns a number for the second
  // one. PostSend, then SendPosted; `held` keeps the data alive.
  std::int64_t PostSend(int peer, int tag, const std::string& what, Done done);
  void SendPosted(std::int64_t number, const void* data, std::size_t bytes, Device::Stream stream,
                  std::shared_ptr<const void> held);
  // PostReceive, into memory of the engine, then, after `done`, TakePosted.
  std::int64_t PostReceive(int peer, int tag, std::size_t bytes, const std::string& what, Done done);
  void TakePosted(std::int64_t number, void* out, std::size_t count, DType dtype, Device::Stream stream);
  // The sum of an array over the ranks of a group (see Messenger::AddGroup), which all call this in the same
  // order. PostGroupReduce, then SendPosted, which copies the array, then, after `done`, TakePosted.
  std::int64_t PostGroupReduce(int group, std::size_t count, DType dtype, const std::string& what, Done done);

  // End all posted sends with an error.
  void EndPosted(const Error& error) { posted_.EndSends(error); }

 private:
  using AddStages = std::function<void(Operation& operation)>;

  void Enqueue(const char* category, const std::string& what, Done done, const AddStages& add_stages);
  // Keep something until the device has reached `event`.
  void HoldUntil(std::shared_ptr<void> event, std::shared_ptr<const void> held, const std::string& what);
  void ReceiveInto(RankDevice& device, const std::shared_ptr<DeviceMessage>& message, void* out,
                   const std::string& what, Done done);
  std::int64_t AddSend(PostedMessage message);
  void SendSummand(std::int64_t number, const PostedMessage& posted, const void* data, std::size_t bytes,
                   Device::Stream stream, std::shared_ptr<const void> held);
  PostedMessage TakeNumber(std::int64_t number, bool receives);

  Progress& progress_;
  Network& network_;
  Messenger& messenger_;
  DeviceSlot& device_;
  Counters& counters_;
  PostedMessages posted_;
};

}  // namespace hvpipe
