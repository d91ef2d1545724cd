// A rank's device as the engine uses it: its stream, its order of collectives, and NCCL where all ranks have
// it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/collective.h"
#include "device/device.h"
#include "device/nccl.h"
#include "core/progress.h"
#include "collectives/transport.h"

namespace hvpipe {

// Which ranks NCCL joins: all, or those of each host, and between hosts data goes by MPI.
enum class NcclSpan { kWorld, kHost };

struct DeviceOptions {
  std::string library;         // that serves the device
  int ordinal = 0;             // among the devices that this process sees
  std::string nccl;            // its library; empty: data goes through the host
  bool nccl_required = false;  // throw where it cannot be used, instead of going through the host
  bool may_share = false;      // NCCL was told that several ranks may have one device
  NcclSpan span = NcclSpan::kWorld;
};

// What a device gave: memory, a stream or an event. It takes it back where the owner ends.
using Owned = std::unique_ptr<void, std::function<void(void*)>>;

Owned OwnStream(Device& device);
Owned OwnEvent(Device& device);

// That the device has no room for as much, with how much it has.
Error NoRoom(Device& device, std::size_t bytes, const std::string& of_what);

// Page-locked host memory that blocking calls pass data through, one call at a time. Locking pages takes
// longer than most copies: so it is kept, and made anew only for a call that needs more.
class Staging {
 public:
  explicit Staging(Device& device) : device_(device) {}
  // At least `bytes`, until the next call; what was there is lost.
  void* Room(std::size_t bytes);

 private:
  Device& device_;
  Owned memory_;
  std::size_t bytes_ = 0;
};

// Memory that messages of any sizes take and give back: making it waits for the device, or locks pages.
class RoomPool {
 public:
  using Make = std::function<Owned(std::size_t bytes)>;
  explicit RoomPool(Make make) : make_(std::move(make)) {}
  // At least `bytes`, to be given back (by the last one that holds it) when nothing on the device uses it.
  std::shared_ptr<void> Take(std::size_t bytes);

 private:
  struct Free {
    std::mutex mutex;
    std::multimap<std::size_t, Owned> rooms;  // by bytes
  };
  const Make make_;
  const std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

// This rank and another one, for messages between them by NCCL. The lower rank makes it, and gives messages
// in both directions their turns.
struct DeviceChannel {
  nccl::UniqueId id{};
  std::unique_ptr<NcclCommunicator> ranks;  // made with the first message
  std::uint64_t given = 0, launched = 0;    // turns
};

struct DeviceSide {
  explicit DeviceSide(const DeviceOptions& options);

  std::unique_ptr<Device> device;
  Owned stream;        // of all communication
  Owned begun, ended;  // events of blocking calls, one of which runs at a time
  Staging staging;     // of these
  std::unique_ptr<NcclLibrary> library;
  std::unique_ptr<NcclCommunicator> ranks;  // null: data goes through the host
  bool nccl_memory = false;                 // all ranks register large buffers with NCCL
  Transport* rail = nullptr;  // the rank at this one's place on each host, where `ranks` are of one host
  std::string way;            // in words: by NCCL, or why not
  OrderQueue order;           // all ranks hand collectives to the device in this order
  // Of messages. By NCCL one at a time is on the device (`sends_or_receives`), and these keep out of the way
  // of collectives, and downloads out of that of uploads.
  Owned message_stream, download_stream, upload_stream;
  bool sends_or_receives = false;
  RoomPool rooms, host_rooms;
  std::map<int, DeviceChannel> channels;  // by the other rank
  Transport* words = nullptr;             // of receivers to senders

  bool nccl_joins_all() const { return ranks != nullptr && rail == nullptr; }
  // All that there are.
  std::vector<NcclCommunicator*> communicators() const;
};

// A bucket's memory on the device and what of it passes through the host: nothing where NCCL joins all ranks,
// this rank's part where it joins those of a host, all of it without NCCL.
class DeviceBuffer {
 public:
  DeviceBuffer(DeviceSide& side, std::size_t count, DType dtype);

  // Elements: as many as were asked for, or some more, all zero, so that NCCL's parts are equal.
  std::size_t count() const { return count_; }
  void* data() const { return data_.get(); }
  void* host() const { return host_.get(); }
  Device::Event filled() const { return filled_.get(); }  // recorded behind the pack
  Device::Event moved() const { return moved_.get(); }    // behind what the communication did last
  Device::Event read() const { return read_.get(); }      // behind the unpack

  // Before NCCL's first collective on it, where NCCL is not busy.
  void Register();
  // Before it ends, where NCCL goes on.
  void Deregister();

 private:
  DeviceSide& side_;
  const std::size_t count_, bytes_;
  const bool of_nccl_;  // on all ranks alike
  bool registered_ = false;
  void* registration_ = nullptr;
  Owned data_, host_;
  Owned filled_, moved_, read_;
};

// Done once `launch` says that all of it was handed to the device. Nothing waits for the device to do it.
class DeviceLaunch : public Collective {
 public:
  explicit DeviceLaunch(std::function<bool()> launch, const char* waiting = "NCCL to start it")
      : launch_(std::move(launch)), waiting_(waiting) {}
  bool Step() override { return done_ = launch_(); }
  bool done() const override { return done_; }
  std::string Waiting() const override { return waiting_; }

 private:
  std::function<bool()> launch_;
  const char* const waiting_;
  bool done_ = false;
};

// Done when the device has come to `event`. An error that NCCL finds meanwhile in `ranks`, which may be null,
// is thrown.
class DeviceArrival : public Collective {
 public:
  DeviceArrival(Device& device, NcclCommunicator* ranks, Device::Event event)
      : device_(device), ranks_(ranks), event_(event) {}
  bool Step() override;
  bool done() const override { return done_; }
  std::string Waiting() const override;

 private:
  Device& device_;
  NcclCommunicator* const ranks_;
  Device::Event event_;
  bool done_ = false;
};

}  // namespace hvpipe
