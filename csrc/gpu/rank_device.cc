// Opens a rank's device, and ends its NCCL communicators.
#include "gpu/rank_device.h"

#include <algorithm>
#include <utility>

#include "base/event_log.h"
#include "collectives/control.h"

namespace hvpipe {

RankDevice::RankDevice(const DeviceOptions& options)
    : device(OpenDevice(options.library, options.ordinal)),
      stream(OwnedStream(*device)),
      begun(OwnedEvent(*device)),
      ended(OwnedEvent(*device)),
      staging(*device),
      message_stream(OwnedStream(*device)),
      download_stream(OwnedStream(*device)),
      upload_stream(OwnedStream(*device)),
      device_pool([this](std::size_t bytes) {
        return OwnedDeviceMemory(*device, bytes, [&] { return OutOfMessageMemory(*device, bytes); });
      }),
      host_pool([this](std::size_t bytes) { return OwnedHostMemory(*device, bytes); }) {}

std::uint64_t RankDevice::Signature() const {
  return Hash(nccl_connects_all() ? "device memory by NCCL" : "device memory through the host");
}

void RankDevice::CheckFreeMemory(std::size_t bytes, const std::string& purpose) const {
  if (device->FreeMemory().free < bytes) throw OutOfGradientMemory(*device, bytes, purpose);
}

void RankDevice::CheckIsHere(const void* array, std::size_t count) const {
  if (count > 0) device->CheckIsHere(array);
}

PeerChannel& RankDevice::ChannelTo(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[peer];
}

Channel& RankDevice::ChannelOf(int group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return groups_[group];
}

void RankDevice::Connect(Channel& channel, std::unique_ptr<NcclCommunicator> communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  channel.ranks = std::move(communicator);
}

std::vector<NcclCommunicator*> RankDevice::Communicators() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return CommunicatorsLocked();
}

std::vector<NcclCommunicator*> RankDevice::CommunicatorsLocked() const {
  std::vector<NcclCommunicator*> all;
  if (ranks) all.push_back(ranks.get());
  for (const auto& [peer, channel] : peers_) {
    if (channel.ranks) all.push_back(channel.ranks.get());
  }
  for (const auto& [group, channel] : groups_) {
    if (channel.ranks) all.push_back(channel.ranks.get());
  }
  return all;
}

void RankDevice::Abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (NcclCommunicator* const communicator : CommunicatorsLocked()) communicator->Abort();
}

bool RankDevice::Aborted(double patience_s) const {
  const auto all = Communicators();
  const double end_s = Now() + patience_s;  // of all of them together
  return std::all_of(all.begin(), all.end(),
                     [&](const auto* each) { return each->Aborted(std::max(0.0, end_s - Now())); });
}

bool RankDevice::Close(double patience_s) {
  const auto all = Communicators();
  try {
    for (NcclCommunicator* const communicator : all) communicator->BeginClose();
    for (NcclCommunicator* const communicator : all) communicator->Close(patience_s);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDeadline) throw;
    return false;
  }
  return true;
}

RankDevice& DeviceSlot::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_) return *device_;
  throw Error("Call use_device before using device arrays.", ErrorKind::kUsage);
}

bool DeviceSlot::empty() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return device_ == nullptr;
}

RankDevice& DeviceSlot::Set(std::unique_ptr<RankDevice> device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  device_ = std::move(device);
  return *device_;
}

void DeviceSlot::Abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_) device_->Abort();
}

}  // namespace hvpipe
