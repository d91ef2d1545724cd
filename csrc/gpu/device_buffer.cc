// Allocates the fused buffer of a bucket in device memory, and registers it with NCCL.
#include "gpu/device_buffer.h"

#include <algorithm>
#include <utility>

#include "base/aligned_buffer.h"

namespace hvpipe {
namespace {

// NCCL allocates in units of 2 MiB, so smaller buffers come from the device itself.
constexpr std::size_t kLeastNcclBytes = 1 << 20;
const char* const kPurpose = "a bucket of gradients";

OwnedHandle OwnedNcclMemory(RankDevice& rank_device, std::size_t bytes) {
  const NcclLibrary& library = *rank_device.library;
  Device& device = *rank_device.device;
  const CurrentDevice current(device);
  void* given = nullptr;
  try {
    given = library.Allocate(bytes);
  } catch (const Error&) {  // its message does not say how much memory is free
    if (device.FreeMemory().free < bytes) throw OutOfGradientMemory(device, bytes, kPurpose);
    throw;
  }
  OwnedHandle memory(given, [&library, &device](void* taken) {
    try {
      const CurrentDevice here(device);
      library.Free(taken);
    } catch (const Error&) {  // the device is lost, and its memory with it
    }
  });
  device.Clear(memory.get(), bytes);
  return memory;
}

// The number of shares into which NCCL scatters a buffer.
std::size_t SharesOf(const RankDevice& device) {
  return device.ranks != nullptr ? static_cast<std::size_t>(device.ranks->size()) : 1;
}

// Rounds up so that all shares are equal. If there are several, each begins at a multiple of 16 bytes, where
// NCCL reads and writes 16 bytes at a time.
std::size_t WholeShares(std::size_t count, std::size_t shares, DType dtype) {
  constexpr std::size_t kWideBytes = 16;
  const std::size_t unit = shares == 1 ? 1 : shares * kWideBytes / SizeOf(dtype);
  return (count + unit - 1) / unit * unit;
}

}  // namespace

DeviceBuffer::DeviceBuffer(RankDevice& rank_device, std::size_t count, DType dtype)
    : device_(rank_device),
      count_(WholeShares(count, SharesOf(rank_device), dtype)),
      bytes_(
          std::max<std::size_t>(count_ * SizeOf(dtype), kAlignment)),  // an empty buffer needs an address too
      nccl_memory_(rank_device.nccl_memory && bytes_ >= kLeastNcclBytes) {
  Device& device = *rank_device.device;
  data_ = nccl_memory_ ? OwnedNcclMemory(rank_device, bytes_) : OwnedDeviceMemory(device, bytes_, [&] {
    return OutOfGradientMemory(device, bytes_, kPurpose);
  });
  if (!rank_device.nccl_connects_all()) host_ = OwnedHostMemory(device, bytes_);
  filled_ = OwnedEvent(device);
  moved_ = OwnedEvent(device);
  read_ = OwnedEvent(device);
}

// Without Deregister, the registration ends with the communicator, which ends before its buffers.
void DeviceBuffer::Register() {
  if (!nccl_memory_ || registered_) return;
  registration_ = device_.ranks->Register(data_.get(), bytes_);
  registered_ = true;
}

void DeviceBuffer::Deregister() {
  if (registration_ != nullptr) device_.ranks->Deregister(std::exchange(registration_, nullptr));
}

}  // namespace hvpipe
