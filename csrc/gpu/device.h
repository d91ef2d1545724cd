// The interface of an accelerator. CUDA's implementation is a separate library, loaded when the first device
// array comes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace hvpipe {

// One device. Any thread may call. Only Allocate, AllocateHost and Clear wait for the device. Errors throw.
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
  // For error messages.
  virtual std::string Name() const = 0;
  // `device` is unique everywhere. The parts of one board share `board`, which is unique on a host.
  struct Identity {
    std::string device, board;
  };
  virtual Identity Identify() const = 0;
  // Make this the current device of the calling thread. Leave restores the previous one, or none. Calls nest;
  // use CurrentDevice.
  virtual void Enter() = 0;
  virtual void Leave() noexcept = 0;

  // Throw if this memory is not on the device. Using such memory would end all work of this process on the
  // device.
  virtual void CheckIsHere(const void* memory) = 0;
  // Bytes of device memory.
  struct MemorySize {
    std::size_t free, total;
  };
  virtual MemorySize FreeMemory() = 0;
  // What the allocation that begins at this address takes. It may be more than was asked for.
  virtual std::size_t AllocatedBytes(const void* memory) = 0;
  // Memory filled with zeros; null if there is too little.
  virtual void* Allocate(std::size_t bytes) = 0;
  virtual void Free(void* memory) noexcept = 0;
  // Fill memory with zeros, and wait until all streams see them.
  virtual void Clear(void* memory, std::size_t bytes) = 0;
  // Page-locked host memory: copies to and from it run concurrently with computation.
  virtual void* AllocateHost(std::size_t bytes) = 0;
  virtual void FreeHost(void* memory) noexcept = 0;

  // A stream of the highest priority, not ordered with the default stream.
  virtual Stream MakeStream() = 0;
  virtual void DestroyStream(Stream stream) noexcept = 0;
  virtual Event MakeEvent() = 0;
  virtual void DestroyEvent(Event event) noexcept = 0;
  virtual void Record(Event event, Stream stream) = 0;
  virtual bool Reached(Event event) = 0;
  virtual void Wait(Stream stream, Event event) = 0;

  virtual void CopyToHost(void* host, const void* device, std::size_t bytes, Stream stream) = 0;
  virtual void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream stream) = 0;
  // to[i] = cast(from[i] * scale) for all pieces, in as few launches as possible. Same results as
  // ScaleAndCast on the host.
  virtual void ScaleAndCast(const std::vector<Piece>& pieces, DType from, DType to, double scale,
                            Stream stream) = 0;
};

// Makes a device current on this thread for a scope. NCCL requires this of its callers.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device& device) : device_(device) { device_.Enter(); }
  ~CurrentDevice() { device_.Leave(); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  Device& device_;
};

// A device library exports two functions: the number of devices that this process sees, and one to open a
// device. `version` detects a library of another build.
constexpr int kDeviceInterface = 5;
constexpr const char* kCountDevices = "hvpipe_count_devices";
constexpr const char* kOpenDevice = "hvpipe_open_device";
using CountDevicesFunction = int (*)();
using OpenDeviceFunction = Device* (*)(int ordinal, int version);

int CountDevices(const std::string& library);
std::unique_ptr<Device> OpenDevice(const std::string& library, int ordinal);

}  // namespace hvpipe
