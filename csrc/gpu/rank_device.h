// A rank's device: its streams, its NCCL communicators, and the order of collectives on it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "gpu/device_memory.h"
#include "gpu/nccl.h"
#include "progress/operation.h"
#include "transport/transport.h"

namespace hvpipe {

struct DeviceOptions {
  std::string library;         // the library that implements the device
  int ordinal = 0;             // among the devices that this process sees
  std::string nccl;            // path of the NCCL library; empty: data goes through host memory
  bool nccl_required = false;  // throw if NCCL cannot be used, instead of going through host memory
  std::string refusal;         // why this rank has no device; empty: it tries to open one
  bool may_share = false;      // NCCL is set up to let several ranks use one device
};

// An NCCL communicator of this rank and some others. Driving thread only.
struct Channel {
  std::unique_ptr<NcclCommunicator> ranks;  // made when it is first used
};

// Of this rank and one peer, for messages. The lower rank creates its address, and numbers the messages of
// both directions.
struct PeerChannel : Channel {
  nccl::UniqueId id{};
  std::uint64_t numbered = 0, launched = 0;  // messages
};

// What a rank owns on its device.
//
// Threads: after UseDevice nothing public changes, except for the objects that the driving thread uses:
// `ranks`, `order`, and the channels. mutex_ guards the maps of channels and the creation of their
// communicators, because Abort may come from any thread.
class RankDevice {
 public:
  explicit RankDevice(const DeviceOptions& options);
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;

  std::shared_ptr<Device> device;           // an abort of NCCL may outlive the rest
  OwnedHandle stream;                       // of all collectives
  OwnedHandle begun, ended;                 // events of blocking calls, one of which runs at a time
  StagingMemory staging;                    // of blocking calls
  std::unique_ptr<NcclLibrary> library;     // null: not used
  std::unique_ptr<NcclCommunicator> ranks;  // of all ranks; null: data goes through host memory
  bool nccl_memory = false;                 // all ranks register large buffers with NCCL
  std::string route;                        // description: by NCCL, or why not
  OrderQueue order;                         // all ranks hand collectives to the device in this order
  OrderQueue arrivals;                      // gathers end in this order, so only the first one is asked for

  // Messages have streams of their own, so that collectives do not delay them, nor downloads delay uploads.
  // All uploads share one.
  OwnedHandle message_stream, download_stream, upload_stream;
  MemoryPool device_pool, host_pool;
  Transport* ready_signals = nullptr;  // from receivers to senders; null unless NCCL carries messages

  bool nccl_connects_all() const { return ranks != nullptr; }
  // Whether NCCL carries messages and sums of groups, which need communicators beside that of all ranks.
  bool messages_by_nccl() const {
    return nccl_connects_all() && library->version() >= nccl::kOldestWithSeveral;
  }
  // Differs between ranks that reduce device memory in different ways.
  std::uint64_t Signature() const;
  // Throw unless this many bytes of device memory are free.
  void CheckFreeMemory(std::size_t bytes, const std::string& purpose) const;
  // Throw unless an array of `count` > 0 elements or bytes lies on this device.
  void CheckIsHere(const void* array, std::size_t count) const;

  PeerChannel& ChannelTo(int peer);
  Channel& ChannelOf(int group);
  void Connect(Channel& channel, std::unique_ptr<NcclCommunicator> ranks);

  // Take the device for a message or a group's sum by NCCL, of which one at a time is under way. Returns
  // whether it was free. Driving thread only.
  bool Take() { return !std::exchange(taken_, true); }
  void Release() { taken_ = false; }

  // Abort all communicators: after an error their kernels would never leave the device.
  void Abort();
  // Whether NCCL has finished all aborts within `patience_s` seconds. Not while any thread drives.
  bool Aborted(double patience_s) const;
  // Close all communicators. Returns false if another rank did not within `patience_s` seconds. Call it only
  // when all ranks have come, because NCCL waits for them. Not while any thread drives.
  bool Close(double patience_s);

 private:
  std::vector<NcclCommunicator*> Communicators() const;
  std::vector<NcclCommunicator*> CommunicatorsLocked() const;  // with mutex_ held

  mutable std::mutex mutex_;
  std::map<int, PeerChannel> peers_;
  std::map<int, Channel> groups_;  // by the number of Network
  bool taken_ = false;
};

// Holds the rank's device from UseDevice on.
//
// Threads: any thread may call. mutex_ guards the pointer, which is set once.
class DeviceSlot {
 public:
  // Throws if UseDevice has not set the device.
  RankDevice& get() const;
  bool empty() const;
  RankDevice& Set(std::unique_ptr<RankDevice> device);

  // See RankDevice. Without a device there is nothing to do.
  void Abort();
  bool Aborted(double patience_s) const { return !device_ || device_->Aborted(patience_s); }
  bool Close(double patience_s) { return !device_ || device_->Close(patience_s); }
  // After an error, leave the device as it is: NCCL may still use it.
  void Leak() { (void)device_.release(); }

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<RankDevice> device_;
};

}  // namespace hvpipe
