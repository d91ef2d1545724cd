// What a rank owns on its device, and the two steps of a collective there: handed over, arrived.
#include "device/device_side.h"

#include <algorithm>
#include <utility>

namespace hvpipe {

namespace {

constexpr std::size_t kLeastStagingBytes = 1 << 16;
// NCCL's own memory comes in pieces of 2 MiB, or is not used.
constexpr std::size_t kLeastNcclBytes = 1 << 20;
const char* const kBucket = "a bucket of gradients";

std::string Megabytes(std::size_t bytes) { return std::to_string((bytes + 999'999) / 1'000'000) + " MB"; }

Owned OwnMemory(Device& device, std::size_t bytes, const std::function<Error()>& no_room) {
  void* const memory = device.Allocate(bytes);
  if (memory == nullptr) throw no_room();
  return {memory, [&device](void* taken) { device.Free(taken); }};
}

Owned OwnHostMemory(Device& device, std::size_t bytes) {
  return {device.AllocateHost(bytes), [&device](void* memory) { device.FreeHost(memory); }};
}

Owned OwnNcclMemory(DeviceSide& side, std::size_t bytes) {
  const NcclLibrary& library = *side.library;
  const CurrentDevice current(*side.device);
  void* given = nullptr;
  try {
    given = library.Allocate(bytes);
  } catch (const Error&) {  // whose words name no bytes
    if (side.device->FreeRoom().free < bytes) throw NoRoom(*side.device, bytes, kBucket);
    throw;
  }
  Owned memory(given, [&library, &device = *side.device](void* taken) {
    try {
      const CurrentDevice here(device);
      library.Free(taken);
    } catch (const Error&) {  // of a device that is lost
    }
  });
  side.device->Clear(memory.get(), bytes);
  return memory;
}

// Into how many parts NCCL scatters a buffer; this rank's part goes through the host.
std::size_t PartsOf(const DeviceSide& side) {
  return side.rail != nullptr ? static_cast<std::size_t>(side.ranks->size()) : 1;
}

}  // namespace

Owned OwnStream(Device& device) {
  return {device.MakeStream(), [&device](void* stream) { device.DestroyStream(stream); }};
}

Owned OwnEvent(Device& device) {
  return {device.MakeEvent(), [&device](void* event) { device.DestroyEvent(event); }};
}

namespace {

Error NoRoomFor(Device& device, std::size_t bytes, const std::string& of_what, const std::string& pieces,
                const std::string& advice) {
  const Device::Room room = device.FreeRoom();
  return Error("The GPU has no room for " + of_what + ": wanted " + Megabytes(bytes) + ", free are " +
                   Megabytes(room.free) + " of " + Megabytes(room.total) +
                   (room.free >= bytes ? pieces : "") +
                   ". Leave it more (TensorFlow: smaller batches, or a memory limit), or " + advice,
               ErrorKind::kUsage);
}

Error NoRoomForMessage(Device& device, std::size_t bytes) {
  return NoRoomFor(device, bytes, "a message between ranks", ", but not in one piece",
                   "cut the batch into more micro-batches");
}

}  // namespace

Error NoRoom(Device& device, std::size_t bytes, const std::string& of_what) {
  return NoRoomFor(device, bytes, of_what,
                   ", but not in one piece: HVPIPE_BUCKET_BYTES=" + std::to_string(bytes / 2) + " may fit",
                   "let compression=\"bf16\" halve what float32 gradients take");
}

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

// In few sizes, at most a quarter above what is wanted, so that what one message gave back serves the next;
// or one up to twice as large. Where the device has nothing left, those go that wait for a message of their
// size.
std::shared_ptr<void> RoomPool::Take(std::size_t bytes) {
  std::size_t quarter = kAlignment;
  while (4 * quarter * 2 <= bytes) quarter *= 2;
  const std::size_t room = std::max<std::size_t>((bytes + quarter - 1) / quarter, 1) * quarter;
  const auto lend = [free = free_](std::size_t size, Owned memory) {
    void* const address = memory.get();
    auto owner = std::make_shared<Owned>(std::move(memory));
    return std::shared_ptr<void>(address, [size, free, owner](void*) {
      const std::lock_guard<std::mutex> lock(free->mutex);
      free->rooms.emplace(size, std::move(*owner));
    });
  };
  {
    const std::lock_guard<std::mutex> lock(free_->mutex);
    const auto found = free_->rooms.lower_bound(room);
    if (found != free_->rooms.end() && found->first <= 2 * room) {
      auto taken = free_->rooms.extract(found);
      return lend(taken.key(), std::move(taken.mapped()));
    }
  }
  try {
    return lend(room, make_(room));
  } catch (const Error&) {
    const std::lock_guard<std::mutex> lock(free_->mutex);
    if (free_->rooms.empty()) throw;
    free_->rooms.clear();
  }
  return lend(room, make_(room));
}

DeviceSide::DeviceSide(const DeviceOptions& options)
    : device(OpenDevice(options.library, options.ordinal)),
      stream(OwnStream(*device)),
      begun(OwnEvent(*device)),
      ended(OwnEvent(*device)),
      staging(*device),
      message_stream(OwnStream(*device)),
      download_stream(OwnStream(*device)),
      upload_stream(OwnStream(*device)),
      rooms([this](std::size_t bytes) {
        return OwnMemory(*device, bytes, [&] { return NoRoomForMessage(*device, bytes); });
      }),
      host_rooms([this](std::size_t bytes) { return OwnHostMemory(*device, bytes); }) {}

std::vector<NcclCommunicator*> DeviceSide::communicators() const {
  std::vector<NcclCommunicator*> all;
  if (ranks) all.push_back(ranks.get());
  for (const auto& [peer, channel] : channels) {
    if (channel.ranks) all.push_back(channel.ranks.get());
  }
  return all;
}

DeviceBuffer::DeviceBuffer(DeviceSide& side, std::size_t count, DType dtype)
    : side_(side),
      count_((count + PartsOf(side) - 1) / PartsOf(side) * PartsOf(side)),
      bytes_(std::max<std::size_t>(count_ * SizeOf(dtype), kAlignment)),  // of nothing there is no address
      of_nccl_(side.nccl_memory && bytes_ >= kLeastNcclBytes) {
  Device& device = *side.device;
  data_ = of_nccl_ ? OwnNcclMemory(side, bytes_)
                   : OwnMemory(device, bytes_, [&] { return NoRoom(device, bytes_, kBucket); });
  if (!side.nccl_joins_all()) host_ = OwnHostMemory(device, (bytes_ + PartsOf(side) - 1) / PartsOf(side));
  filled_ = OwnEvent(device);
  moved_ = OwnEvent(device);
  read_ = OwnEvent(device);
}

// Unless it is taken back, the registration ends with the communicator, which ends before its buffers.
void DeviceBuffer::Register() {
  if (!of_nccl_ || registered_) return;
  registration_ = side_.ranks->Register(data_.get(), bytes_);
  registered_ = true;
}

void DeviceBuffer::Deregister() {
  if (registration_ != nullptr) side_.ranks->Deregister(std::exchange(registration_, nullptr));
}

bool DeviceArrival::Step() {
  if (ranks_ != nullptr) (void)ranks_->Ready();
  return done_ = device_.Reached(event_);
}

std::string DeviceArrival::Waiting() const {
  return device_.Name() + " to finish what was handed to it" +
         (ranks_ != nullptr ? " (NCCL waits for all " + std::to_string(ranks_->size()) + " ranks)" : "");
}

}  // namespace hvpipe
