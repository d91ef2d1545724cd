// What a rank owns on its device, and the two steps of a collective there: handed over, arrived.
#include "device_side.h"

#include <algorithm>

namespace hvpipe {

namespace {

constexpr std::size_t kLeastStagingBytes = 1 << 16;

Owned OwnMemory(Device& device, std::size_t bytes) {
  return {device.Allocate(bytes), [&device](void* memory) { device.Free(memory); }};
}

Owned OwnHostMemory(Device& device, std::size_t bytes) {
  return {device.AllocateHost(bytes), [&device](void* memory) { device.FreeHost(memory); }};
}

Owned OwnStream(Device& device) {
  return {device.MakeStream(), [&device](void* stream) { device.DestroyStream(stream); }};
}

Owned OwnEvent(Device& device) {
  return {device.MakeEvent(), [&device](void* event) { device.DestroyEvent(event); }};
}

// Into how many parts NCCL scatters a buffer; this rank's part goes through the host.
std::size_t PartsOf(const DeviceSide& side) {
  return side.rail != nullptr ? static_cast<std::size_t>(side.ranks->size()) : 1;
}

}  // namespace

// In powers of two: calls of growing sizes make few.
void* Staging::Room(std::size_t bytes) {
  if (bytes > bytes_) {
    std::size_t room = kLeastStagingBytes;
    while (room < bytes) room *= 2;
    memory_.reset();
    bytes_ = 0;
    memory_ = OwnHostMemory(device_, room);
    bytes_ = room;
  }
  return memory_.get();
}

DeviceSide::DeviceSide(const DeviceOptions& options)
    : device(OpenDevice(options.library, options.ordinal)),
      stream(OwnStream(*device)),
      begun(OwnEvent(*device)),
      ended(OwnEvent(*device)),
      staging(*device) {
  device->MakeCurrent();
}

DeviceBuffer::DeviceBuffer(DeviceSide& side, std::size_t count, DType dtype)
    : count_((count + PartsOf(side) - 1) / PartsOf(side) * PartsOf(side)) {
  Device& device = *side.device;
  const auto room = [&](std::size_t elements) {  // of nothing there is no address
    return std::max<std::size_t>(elements * SizeOf(dtype), kAlignment);
  };
  data_ = OwnMemory(device, room(count_));
  if (!side.nccl_joins_all()) host_ = OwnHostMemory(device, room(count_ / PartsOf(side)));
  filled_ = OwnEvent(device);
  moved_ = OwnEvent(device);
  read_ = OwnEvent(device);
}

bool DeviceArrival::Step() {
  if (side_.ranks) (void)side_.ranks->Ready();
  return done_ = side_.device->Reached(event_);
}

std::string DeviceArrival::Waiting() const {
  return side_.device->Name() + " to finish what was handed to it" +
         (side_.ranks ? " (NCCL waits for all ranks)" : "");
}

}  // namespace hvpipe
