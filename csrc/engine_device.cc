// Device memory in the engine: buckets and blocking collectives, by NCCL or through the host to MPI.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "engine.h"
#include "gather.h"

namespace hvpipe {

std::string Engine::UseDevice(const DeviceOptions& options, const Interrupt& interrupt) {
  if (device_) throw Error("The engine has its device already.", ErrorKind::kUsage);
  auto side = std::make_unique<DeviceSide>(options);
  side->way = size_ == 1 ? "one rank" : "through the host: no NCCL was named";
  if (size_ > 1 && !options.nccl.empty()) {
    if (!options.may_share) CheckOwnDevices(*side->device, interrupt);
    JoinNccl(*side, options, interrupt);
  }
  Agree("choice of devices", 0, interrupt);
  const std::lock_guard<std::mutex> lock(mutex_);
  device_ = std::move(side);
  return device_->way;
}

// NCCL does not say who shares a device, but hangs or fails somewhere inside.
void Engine::CheckOwnDevices(const Device& device, const Interrupt& interrupt) {
  using Name = std::array<char, 256>;
  Name mine{};
  if (gethostname(mine.data(), 128) != 0) mine[0] = '\0';
  const std::string name = std::string(mine.data()) + ": " + device.Name();
  std::copy_n(name.begin(), std::min(name.size(), mine.size() - 1), mine.begin());
  std::vector<Name> all(static_cast<std::size_t>(size_));
  AllGather(mine.data(), all.data(), sizeof mine, "devices of all ranks", interrupt);
  // Every rank sees all names, and all end: none waits for one that has ended.
  for (auto second = all.begin(); second != all.end(); ++second) {
    const auto first = std::find(all.begin(), second, *second);
    if (first == second) continue;
    throw Error(
        "Each rank should have a GPU of its own: start at most as many ranks on a host as it has, or go "
        "through the host with HVPIPE_NCCL_LIBRARY=none. Received: ranks " +
            std::to_string(first - all.begin()) + " and " + std::to_string(second - all.begin()) + " on " +
            first->data(),
        ErrorKind::kUsage);
  }
}

// All ranks by NCCL or none: so each says first whether it could.
void Engine::JoinNccl(DeviceSide& side, const DeviceOptions& options, const Interrupt& interrupt) {
  int version = 0;
  std::string why;
  try {
    side.library = std::make_unique<NcclLibrary>(options.nccl);
    version = side.library->version();
  } catch (const Error& error) {
    if (options.nccl_required) throw;
    why = error.what();
  }
  std::vector<int> versions(static_cast<std::size_t>(size_));
  AllGather(&version, versions.data(), sizeof version, "choice of NCCL", interrupt);
  const bool same = std::all_of(versions.begin(), versions.end(), [&](int v) { return v == versions[0]; });
  if (version == 0 || !same) {
    if (why.empty()) why = "the ranks have different versions of NCCL, or some have none";
    if (options.nccl_required)
      throw Error("NCCL should serve all ranks. Received: " + why, ErrorKind::kUsage);
    side.library.reset();
    side.way = "through the host: " + why;
    return;
  }
  nccl::UniqueId id{};
  if (rank_ == 0) id = side.library->NewId();
  Broadcast(&id, sizeof id, 0, "NCCL's address", interrupt);
  side.ranks = std::make_unique<NcclCommunicator>(*side.library, rank_, size_, id);
  side.ranks->WaitUntilReady(options_.timeout_s, "joining all ranks", interrupt);
  side.way = "by NCCL " + side.library->VersionText();
}

DeviceSide& Engine::device() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_) return *device_;
  throw Error("The engine should be told of its device first (use_device). Received: a device array",
              ErrorKind::kUsage);
}

// Collectives are handed to the device in one order on all ranks; when they arrive is its own matter.
void Engine::AddNcclStages(Operation& operation, Device::Event begun, Device::Event ended,
                           std::function<void(NcclCommunicator&, Device::Stream)> call) {
  DeviceSide* const side = device_.get();
  auto called = std::make_shared<bool>(false);
  const auto launch = [=] {
    if (!*called) {
      side->device->Wait(side->stream.get(), begun);
      call(*side->ranks, side->stream.get());
      *called = true;
    }
    if (!side->ranks->Ready()) return false;  // the launch may still be under way in NCCL's own thread
    side->device->Record(ended, side->stream.get());
    return true;
  };
  operation.stages.push_back(
      {[=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); }, &side->order, nullptr});
  AddArrival(operation, ended);
}

void Engine::AddArrival(Operation& operation, Device::Event event) {
  DeviceSide* const side = device_.get();
  operation.stages.push_back(
      {[=](const Operation&) { return std::make_unique<DeviceArrival>(*side, event); }, nullptr, nullptr});
}

void Engine::AddCopy(Operation& operation, Device::Event begun, Device::Event ended,
                     std::function<void(Device&, Device::Stream)> copy) {
  DeviceSide* const side = device_.get();
  const auto launch = [=] {
    side->device->Wait(side->stream.get(), begun);
    copy(*side->device, side->stream.get());
    side->device->Record(ended, side->stream.get());
    return true;
  };
  operation.stages.push_back(
      {[=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); }, nullptr, nullptr});
  AddArrival(operation, ended);
}

//   NCCL       handed over in order | arrived
//   without    copy to the host | the stages of host memory | copy back
void Engine::AddDeviceReduce(Operation& operation, const DeviceReduce& reduce) {
  if (size_ == 1) return;
  if (device_->ranks) {
    AddNcclStages(operation, reduce.begun, reduce.ended, [=](NcclCommunicator& ranks, Device::Stream stream) {
      ranks.AllReduce(reduce.in, reduce.out, reduce.count, reduce.dtype, stream);
    });
    return;
  }
  const std::size_t bytes = reduce.count * SizeOf(reduce.dtype);
  AddCopy(operation, reduce.begun, reduce.ended, [=](Device& device, Device::Stream stream) {
    device.CopyToHost(reduce.host, reduce.in, bytes, stream);
  });
  const auto ends = std::make_shared<const Ends>(Ends{reduce.host, reduce.host});
  AddReduceStages(operation, ends, reduce.count, reduce.dtype, 1.0, reduce.tag);
  AddCopy(operation, reduce.begun, reduce.ended, [=](Device& device, Device::Stream stream) {
    device.CopyFromHost(reduce.out, reduce.host, bytes, stream);
  });
}

std::uint64_t Engine::DeviceSignature() const {
  return Hash(device().ranks ? "device memory by NCCL" : "device memory through the host");
}

namespace {

std::vector<Device::Piece> PackPieces(const BucketLayout& layout, const std::vector<const void*>& tensors,
                                      void* buffer) {
  std::vector<Device::Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    char* const place = static_cast<char*>(buffer) + layout.offsets[i] * SizeOf(layout.wire_type);
    pieces.push_back({tensors[i], place, layout.counts[i]});
  }
  return pieces;
}

}  // namespace

DeviceBuffer& Engine::DeviceBufferOf(const Bucket& bucket) const {
  if (bucket.device) return *bucket.device;
  throw Error("The bucket's plan should be one of device memory. Received: bucket=" + bucket.layout.name,
              ErrorKind::kUsage);
}

void Engine::SubmitDevice(int plan, int index, const std::vector<const void*>& tensors, double scale,
                          Device::Stream stream) {
  Bucket& target = bucket(plan, index);
  DeviceBuffer& buffer = DeviceBufferOf(target);
  Device& on = *device().device;
  const BucketLayout& layout = target.layout;
  const std::shared_ptr<Operation> operation = Claim(target);
  // On the stream of whoever made the gradients: they may be freed or overwritten behind this.
  if (target.unpacked) on.Wait(stream, buffer.read());
  on.Move(PackPieces(layout, tensors, buffer.data()), layout.tensor_type, layout.wire_type, scale, nullptr,
          stream);
  on.Record(buffer.filled(), stream);
  progress_->MakeReady(operation);
}

void Engine::UnpackDevice(int plan, int index, const std::vector<void*>& tensors, Device::Stream stream) {
  Bucket& source = bucket(plan, index);
  DeviceBuffer& buffer = DeviceBufferOf(source);
  Device& on = *device().device;
  const BucketLayout& layout = source.layout;
  std::vector<const void*> outputs(tensors.begin(), tensors.end());
  std::vector<Device::Piece> pieces = PackPieces(layout, outputs, buffer.data());
  for (std::size_t i = 0; i < pieces.size(); ++i) pieces[i] = {pieces[i].to, tensors[i], pieces[i].count};
  on.Wait(stream, buffer.filled());  // of one rank nothing else says that the pack is over
  on.Move(pieces, layout.wire_type, layout.tensor_type, 1.0, nullptr, stream);
  on.Record(buffer.read(), stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  source.unpacked = true;
  source.state = BucketState::kIdle;
}

void Engine::AllReduceDevice(const void* in, void* out, std::size_t count, DType dtype, double scale,
                             const std::string& what, Device::Stream stream, const Interrupt& interrupt) {
  DeviceSide& side = device();
  if (size_ > 1) {
    progress_->Run(Checked(what), interrupt);
    void* const host = side.ranks ? nullptr : side.staging.Room(count * SizeOf(dtype));
    const Device::Event begun = side.begun.get();
    side.device->Record(begun, stream);
    auto operation = Blocking(what);
    operation->traced = "reduce";
    AddDeviceReduce(*operation, {in, out, host, count, dtype, begun, side.ended.get(), NextTag()});
    progress_->Run(operation, interrupt);
    in = out;
  }
  if (in == out && scale == 1.0) return;
  side.device->Move({{in, out, count}}, dtype, dtype, scale, nullptr, stream);
}

void Engine::BroadcastDevice(void* data, std::size_t bytes, int root, const std::string& what,
                             Device::Stream stream, const Interrupt& interrupt) {
  DeviceSide& side = device();
  if (size_ == 1) return;
  const bool mine = rank_ == root;
  progress_->Run(Checked(what), interrupt);
  const Device::Event begun = side.begun.get(), ended = side.ended.get();
  side.device->Record(begun, stream);
  const auto run = [&](const auto& add) {
    auto operation = Blocking(what);
    add(*operation);
    progress_->Run(operation, interrupt);
  };
  if (side.ranks) {
    return run([&](Operation& operation) {
      AddNcclStages(operation, begun, ended, [=](NcclCommunicator& ranks, Device::Stream on) {
        ranks.Broadcast(data, bytes, root, on);
      });
    });
  }
  void* const host = side.staging.Room(bytes);
  if (mine) {
    run([&](Operation& operation) {
      AddCopy(operation, begun, ended,
              [=](Device& device, Device::Stream on) { device.CopyToHost(host, data, bytes, on); });
    });
  }
  Broadcast(host, bytes, root, what, interrupt);
  if (mine) return;
  run([&](Operation& operation) {
    AddCopy(operation, begun, ended,
            [=](Device& device, Device::Stream on) { device.CopyFromHost(data, host, bytes, on); });
  });
}

// A communicator that failed is ended at once, or its kernels would keep the device for ever.
void Engine::AbortDevice() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_ && device_->ranks) device_->ranks->Abort();
}

}  // namespace hvpipe
