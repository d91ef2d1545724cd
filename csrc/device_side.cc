// What a rank owns on its device, and the two steps of a collective there: handed over, arrived.
#include "device_side.h"

#include <algorithm>

namespace hvpipe {

DeviceSide::DeviceSide(const DeviceOptions& options) : device(OpenDevice(options.library, options.ordinal)) {
  device->MakeCurrent();
  stream = device->MakeStream();
  begun = device->MakeEvent();
  ended = device->MakeEvent();
}

DeviceSide::~DeviceSide() {
  ranks.reset();
  if (begun != nullptr) device->DestroyEvent(begun);
  if (ended != nullptr) device->DestroyEvent(ended);
  if (stream != nullptr) device->DestroyStream(stream);
}

// `on_device`: without it only what data that lies elsewhere on the device needs to pass through the host.
DeviceBuffer::DeviceBuffer(DeviceSide& side, std::size_t bytes, bool on_device) : device_(*side.device) {
  const std::size_t room = std::max<std::size_t>(bytes, kAlignment);  // of nothing there is no address
  if (on_device) data_ = device_.Allocate(room);
  if (!side.ranks) host_ = device_.AllocateHost(room);
  filled_ = device_.MakeEvent();
  moved_ = device_.MakeEvent();
  read_ = device_.MakeEvent();
}

DeviceBuffer::~DeviceBuffer() {
  for (const Device::Event event : {filled_, moved_, read_}) device_.DestroyEvent(event);
  if (host_ != nullptr) device_.FreeHost(host_);
  if (data_ != nullptr) device_.Free(data_);
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
