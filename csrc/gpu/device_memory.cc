// Allocates and pools memory of a device, and says how much is free when there is too little.
#include "gpu/device_memory.h"

#include <algorithm>
#include <utility>

#include "base/aligned_buffer.h"

namespace hvpipe {
namespace {

constexpr std::size_t kLeastStagingBytes = 1 << 16;

std::string Megabytes(std::size_t bytes) { return std::to_string((bytes + 999'999) / 1'000'000) + " MB"; }

// `fragmented` is added if enough memory is free in all, but in smaller blocks.
Error OutOfMemory(Device& device, std::size_t bytes, const std::string& purpose,
                  const std::string& fragmented, const std::string& advice) {
  const Device::MemorySize memory = device.FreeMemory();
  return Error("The GPU has no free block of " + Megabytes(bytes) + " for " + purpose + ": free are " +
                   Megabytes(memory.free) + " of " + Megabytes(memory.total) +
                   (memory.free >= bytes ? fragmented : "") +
                   ". Leave more memory free (TensorFlow: smaller batches, or a memory limit), or " + advice,
               ErrorKind::kUsage);
}

}  // namespace

OwnedHandle OwnedStream(Device& device) {
  return {device.MakeStream(), [&device](void* stream) { device.DestroyStream(stream); }};
}

OwnedHandle OwnedEvent(Device& device) {
  return {device.MakeEvent(), [&device](void* event) { device.DestroyEvent(event); }};
}

OwnedHandle OwnedHostMemory(Device& device, std::size_t bytes) {
  return {device.AllocateHost(bytes), [&device](void* memory) { device.FreeHost(memory); }};
}

OwnedHandle OwnedDeviceMemory(Device& device, std::size_t bytes,
                              const std::function<Error()>& out_of_memory) {
  void* const memory = device.Allocate(bytes);
  if (memory == nullptr) throw out_of_memory();
  return {memory, [&device](void* taken) { device.Free(taken); }};
}

Error OutOfGradientMemory(Device& device, std::size_t bytes, const std::string& purpose) {
  return OutOfMemory(device, bytes, purpose,
                     ", in smaller blocks: try HVPIPE_BUCKET_BYTES=" + std::to_string(bytes / 2),
                     "use compression=\"bf16\", which halves float32 gradients");
}

Error OutOfMessageMemory(Device& device, std::size_t bytes) {
  return OutOfMemory(device, bytes, "a message or a sum of some ranks", ", in smaller blocks",
                     "cut the batch into more micro-batches, or the model into more stages");
}

// Sizes are powers of two, so that calls of growing sizes allocate rarely.
void* StagingMemory::AtLeast(std::size_t bytes) {
  if (bytes > bytes_) {
    std::size_t size = kLeastStagingBytes;
    while (size < bytes) size *= 2;
    memory_.reset();
    bytes_ = 0;
    memory_ = OwnedHostMemory(device_, size);
    bytes_ = size;
  }
  return memory_.get();
}

// Rounds up to one of a few sizes, at most a quarter larger, so that messages can reuse each other's memory.
// A free block of up to twice that size is reused as well. If an allocation fails, the pool first gives its
// free blocks back.
std::shared_ptr<void> MemoryPool::Take(std::size_t bytes) {
  std::size_t granule = kAlignment;
  while (4 * granule * 2 <= bytes) granule *= 2;
  const std::size_t rounded = std::max<std::size_t>((bytes + granule - 1) / granule, 1) * granule;
  const auto lend = [free = free_](std::size_t size, OwnedHandle memory) {
    void* const address = memory.get();
    auto owner = std::make_shared<OwnedHandle>(std::move(memory));
    return std::shared_ptr<void>(address, [size, free, owner](void*) {
      const std::lock_guard<std::mutex> lock(free->mutex);
      free->by_bytes.emplace(size, std::move(*owner));
    });
  };
  {
    const std::lock_guard<std::mutex> lock(free_->mutex);
    const auto found = free_->by_bytes.lower_bound(rounded);
    if (found != free_->by_bytes.end() && found->first <= 2 * rounded) {
      auto taken = free_->by_bytes.extract(found);
      return lend(taken.key(), std::move(taken.mapped()));
    }
  }
  try {
    return lend(rounded, allocate_(rounded));
  } catch (const Error&) {
    decltype(free_->by_bytes) given_back;  // ends without the lock, because freeing waits for the device
    const std::lock_guard<std::mutex> lock(free_->mutex);
    if (free_->by_bytes.empty()) throw;
    given_back.swap(free_->by_bytes);
  }
  return lend(rounded, allocate_(rounded));
}

}  // namespace hvpipe
