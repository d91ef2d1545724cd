// Allocates the fused buffer of a bucket in device memory, and registers it with NCCL.
#include "device/device_buffer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/aligned_buffer.h"

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
  block_ = blocks_.emplace_back(MakeBlock()).get();
  const std::size_t shares = SharesOf(rank_device);
  if (!rank_device.nccl_connects_all()) host_ = OwnedHostMemory(device, (bytes_ + shares - 1) / shares);
  filled_ = OwnedEvent(device);
  moved_ = OwnedEvent(device);
}

// A loan that outlives the buffer may outlive the device as well, which its memory and event need to end.
DeviceBuffer::~DeviceBuffer() {
  for (const std::shared_ptr<Block>& block : blocks_) {
    if (!IsLent(block)) continue;
    block->left = true;
    new std::shared_ptr<Block>(block);
  }
}

std::shared_ptr<DeviceBuffer::Block> DeviceBuffer::MakeBlock() const {
  Device& device = *device_.device;
  auto block = std::make_shared<Block>();
  block->data = nccl_memory_ ? OwnedNcclMemory(device_, bytes_) : OwnedDeviceMemory(device, bytes_, [&] {
    return OutOfGradientMemory(device, bytes_, kPurpose);
  });
  block->read = OwnedEvent(device);
  return block;
}

bool DeviceBuffer::IsLent(const std::shared_ptr<Block>& block) {
  if (block.use_count() > 1) return true;
  std::atomic_thread_fence(std::memory_order_acquire);  // pairs with the release by the end of the loan
  return false;
}

void DeviceBuffer::TakeBlock(Device::Stream stream) {
  const auto found = std::find_if_not(blocks_.begin(), blocks_.end(), IsLent);
  block_ = (found != blocks_.end() ? *found : blocks_.emplace_back(MakeBlock())).get();
  if (block_->was_read) device_.device->Wait(stream, block_->read.get());
}

void DeviceBuffer::NoteRead(Device::Stream stream) {
  device_.device->Record(block_->read.get(), stream);
  block_->was_read = true;
}

std::shared_ptr<void> DeviceBuffer::Lend(Device::Stream stream) {
  const auto block = *std::find_if(blocks_.begin(), blocks_.end(),
                                   [this](const auto& each) { return each.get() == block_; });
  return {block->data.get(), [block, stream, device = device_.device.get()](void*) {
            if (block->left) return;
            try {
              device->Record(block->read.get(), stream);
              block->was_read = true;
            } catch (const Error&) {  // the device is lost
            }
          }};
}

bool DeviceBuffer::Read() const {
  return std::all_of(blocks_.begin(), blocks_.end(), [this](const auto& block) {
    return IsLent(block) || !block->was_read || device_.device->Reached(block->read.get());
  });
}

// Without Deregister, the registration ends with the communicator, which ends before its buffers.
void DeviceBuffer::Register() {
  if (!nccl_memory_ || block_->registered) return;
  block_->registration = device_.ranks->Register(block_->data.get(), bytes_);
  block_->registered = true;
}

void DeviceBuffer::Deregister() {
  for (const auto& block : blocks_) {
    if (block->registration != nullptr) {
      device_.ranks->Deregister(std::exchange(block->registration, nullptr));
    }
  }
}

}  // namespace hvpipe
