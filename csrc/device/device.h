// What the engine needs of an accelerator. CUDA's is a library of its own, loaded when the first device array
// comes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/bucket.h"

namespace hvpipe {

// One device. Nothing here but making memory waits for it, and any thread may call; what goes wrong throws.
class Device {
 public:
  using Stream = void*;
  using Event = void*;
  struct Piece {
    const void* from;
    void* to;
    std::size_t count;  // elements
  };

  virtual ~Device() = default;
  // In words, for messages.
  virtual std::string Name() const = 0;
  // What no other device anywhere has, and what the parts of one board have in common on a host.
  struct Identity {
    std::string device, board;
  };
  virtual Identity Which() const = 0;
  // Makes it the device of the calling thread, until Leave puts back what was: another one or none. Nests.
  // See CurrentDevice.
  virtual void Enter() = 0;
  virtual void Leave() noexcept = 0;

  // Throws where this memory is not the device's: to use it there would end all work of this process on it.
  virtual void CheckIsHere(const void* memory) = 0;
  // Bytes of its memory.
  struct Room {
    std::size_t free, total;
  };
  virtual Room FreeRoom() = 0;
  // Filled with zeros; null where there is no room.
  virtual void* Allocate(std::size_t bytes) = 0;
  virtual void Free(void* memory) noexcept = 0;
  // Fills memory with zeros that any stream sees from now on; waits for that.
  virtual void Clear(void* memory, std::size_t bytes) = 0;
  // Host memory that copies to and from the device run beside computing with.
  virtual void* AllocateHost(std::size_t bytes) = 0;
  virtual void FreeHost(void* memory) noexcept = 0;

  // Of the highest priority, and not ordered with the default stream.
  virtual Stream MakeStream() = 0;
  virtual void DestroyStream(Stream stream) noexcept = 0;
  virtual Event MakeEvent() = 0;
  virtual void DestroyEvent(Event event) noexcept = 0;
  virtual void Record(Event event, Stream stream) = 0;
  virtual bool Reached(Event event) = 0;
  virtual void Wait(Stream stream, Event event) = 0;

  virtual void CopyToHost(void* host, const void* device, std::size_t bytes, Stream stream) = 0;
  virtual void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream stream) = 0;
  // to[i] = cast(from[i] * scale) for all pieces in one launch, as PackScaled does it on the host. Where a
  // result is not finite, *not_finite (device memory; may be null) becomes 1.
  virtual void Move(const std::vector<Piece>& pieces, DType from, DType to, double scale,
                    unsigned* not_finite, Stream stream) = 0;
};

// Has a device current on this thread for a scope, as NCCL wants it of whoever calls.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device& device) : device_(device) { device_.Enter(); }
  ~CurrentDevice() { device_.Leave(); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  Device& device_;
};

// A library that serves devices has two functions: how many this process sees, and one of them. `version`
// guards against a library of another build.
constexpr int kDeviceInterface = 3;
constexpr const char* kCountDevices = "hvpipe_count_devices";
constexpr const char* kOpenDevice = "hvpipe_open_device";
using CountDevicesFunction = int (*)();
using OpenDeviceFunction = Device* (*)(int ordinal, int version);

int CountDevices(const std::string& library);
std::unique_ptr<Device> OpenDevice(const std::string& library, int ordinal);

}  // namespace hvpipe
