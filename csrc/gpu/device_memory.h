// Memory, streams and events of a device, with owners that give them back.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/error.h"
#include "gpu/device.h"

namespace hvpipe {

// Memory, a stream or an event of a device, which gets it back when the owner ends.
using OwnedHandle = std::unique_ptr<void, std::function<void(void*)>>;

OwnedHandle OwnedStream(Device& device);
OwnedHandle OwnedEvent(Device& device);
// Page-locked.
OwnedHandle OwnedHostMemory(Device& device, std::size_t bytes);
// Filled with zeros. Throws `out_of_memory()` if the device has too little.
OwnedHandle OwnedDeviceMemory(Device& device, std::size_t bytes, const std::function<Error()>& out_of_memory);

// The error that the device has too little memory for gradients, with how much is free.
Error OutOfGradientMemory(Device& device, std::size_t bytes, const std::string& purpose);
// The same for a message between ranks, or a sum of some of them.
Error OutOfMessageMemory(Device& device, std::size_t bytes);

// Page-locked host memory for the data of blocking calls, one call at a time. Locking pages takes longer than
// most copies, so the memory is kept and only grows.
class StagingMemory {
 public:
  explicit StagingMemory(Device& device) : device_(device) {}
  // At least `bytes`, valid until the next call. The previous contents are lost.
  void* AtLeast(std::size_t bytes);

 private:
  Device& device_;
  OwnedHandle memory_;
  std::size_t bytes_ = 0;
};

// Memory that messages borrow. It is kept for later messages, because allocating waits for the device or
// locks pages.
//
// Threads: any thread may take and give back; a lock guards the free memory.
class MemoryPool {
 public:
  using Allocate = std::function<OwnedHandle(std::size_t bytes)>;
  explicit MemoryPool(Allocate allocate) : allocate_(std::move(allocate)) {}
  // At least `bytes`. The last holder must let it go only when the device no longer uses it.
  std::shared_ptr<void> Take(std::size_t bytes);

 private:
  // Shared with the memory that is taken, which may outlive the pool.
  struct FreeList {
    std::mutex mutex;
    std::multimap<std::size_t, OwnedHandle> by_bytes;
  };
  const Allocate allocate_;
  const std::shared_ptr<FreeList> free_ = std::make_shared<FreeList>();
};

}  // namespace hvpipe
