// Device memory in the engine: buckets and blocking collectives, by NCCL or through the host to MPI.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
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

namespace {

// What a rank says before NCCL joins it to others.
struct Joining {
  int version;  // of its NCCL; 0 where there is none
  NcclSpan span;
  int host;  // the first rank on its host
};

// The rank at `place` on each host, in order; none where not every host has `local_size` ranks.
std::vector<int> RailOf(const std::vector<Joining>& all, std::size_t place, std::size_t local_size) {
  std::map<int, std::vector<int>> hosts;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    hosts[all[rank].host].push_back(static_cast<int>(rank));
  }
  std::vector<int> rail;
  for (const auto& [first, ranks] : hosts) {
    if (ranks.size() != local_size) return {};
    rail.push_back(ranks[place]);
  }
  std::sort(rail.begin(), rail.end());
  return rail;
}

}  // namespace

// All ranks by NCCL or none: so each says first whether it could, and whoever throws does so after that.
void Engine::JoinNccl(DeviceSide& side, const DeviceOptions& options, const Interrupt& interrupt) {
  Joining mine{0, options.span, host_};
  std::string why;
  try {
    side.library = std::make_unique<NcclLibrary>(options.nccl);
    mine.version = side.library->version();
  } catch (const Error& error) {
    why = error.what();
  }
  std::vector<Joining> all(static_cast<std::size_t>(size_));
  AllGather(&mine, all.data(), sizeof mine, "choice of NCCL", interrupt);
  const bool same = std::all_of(all.begin(), all.end(), [&](const Joining& other) {
    return other.version == mine.version && other.span == mine.span;
  });
  if (mine.version == 0 || !same) {
    if (why.empty()) {
      why = "the ranks have different versions of NCCL or another HVPIPE_NCCL_SPAN, or some have no NCCL";
    }
    if (options.nccl_required)
      throw Error("NCCL should serve all ranks. Received: " + why, ErrorKind::kUsage);
    side.way = "through the host: " + why;
    return;
  }
  if (options.span == NcclSpan::kHost && hosts_ > 1) {
    const auto place = static_cast<std::size_t>(local_rank_);
    JoinHosts(side, RailOf(all, place, static_cast<std::size_t>(local_size_)), interrupt);
  } else {
    JoinRanks(side, {rank_, size_, 0}, interrupt);
    side.way = "by NCCL " + side.library->VersionText();
  }
}

// NCCL inside each host; `rail` is RailOf for this rank's place.
void Engine::JoinHosts(DeviceSide& side, const std::vector<int>& rail, const Interrupt& interrupt) {
  if (rail.empty()) {
    side.way =
        "through the host: NCCL stays inside hosts (HVPIPE_NCCL_SPAN=host) only where all have the same "
        "number of ranks. Received: " +
        std::to_string(size_) + " ranks on " + std::to_string(hosts_) + " hosts";
  } else if (local_size_ == 1) {
    side.way =
        "through the host: NCCL is to stay inside hosts (HVPIPE_NCCL_SPAN=host), and each has one rank";
  } else {
    JoinRanks(side, {local_rank_, local_size_, host_}, interrupt);
    const int group = AddGroup(rail);
    const std::lock_guard<std::mutex> lock(mutex_);
    side.rail = groups_[static_cast<std::size_t>(group)]->transport.get();
    side.way =
        "by NCCL " + side.library->VersionText() + " inside hosts, through the host and MPI between them";
  }
}

// Called by all ranks, whichever communicator each of them is to be in.
void Engine::JoinRanks(DeviceSide& side, const NcclPlace& place, const Interrupt& interrupt) {
  nccl::UniqueId id{};
  if (rank_ == place.first) id = side.library->NewId();
  std::vector<nccl::UniqueId> ids(static_cast<std::size_t>(size_));
  AllGather(&id, ids.data(), sizeof id, "NCCL's addresses", interrupt);
  const CurrentDevice current(*side.device);
  side.ranks = std::make_unique<NcclCommunicator>(*side.library, place.rank, place.size,
                                                  ids[static_cast<std::size_t>(place.first)]);
  side.ranks->WaitUntilReady(options_.timeout_s, "joining " + std::to_string(place.size) + " ranks",
                             interrupt);
  AgreeOnNcclMemory(side, interrupt);
}

// What one rank registers all must, so each tries first. The device is current.
void Engine::AgreeOnNcclMemory(DeviceSide& side, const Interrupt& interrupt) {
  char able = 0;
  if (side.library->has_memory()) {
    void* memory = nullptr;
    try {
      memory = side.library->Allocate(kAlignment);
      if (void* const registration = side.ranks->Register(memory, kAlignment)) {
        side.ranks->Deregister(registration);
        able = 1;
      }
    } catch (const Error&) {  // then buffers are the device's own, as before NCCL 2.19
    }
    if (memory != nullptr) side.library->Free(memory);
  }
  std::vector<char> all(static_cast<std::size_t>(size_));
  AllGather(&able, all.data(), sizeof able, "choice of memory", interrupt);
  side.nccl_memory = std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

DeviceSide& Engine::device() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_) return *device_;
  throw Error("The engine should be told of its device first (use_device). Received: a device array",
              ErrorKind::kUsage);
}

// Collectives are handed to the device in one order on all ranks; when they arrive is its own matter. `then`
// goes behind them.
void Engine::AddNcclStages(Operation& operation, Device::Event begun, Device::Event ended, DeviceCall call,
                           DeviceCall then) {
  DeviceSide* const side = device_.get();
  auto called = std::make_shared<bool>(false);
  const auto launch = [=] {
    if (!*called) {
      const CurrentDevice current(*side->device);
      side->device->Wait(side->stream.get(), begun);
      call(*side, side->stream.get());
      *called = true;
    }
    if (!side->ranks->Ready()) return false;  // the launch may still be under way in NCCL's own thread
    if (then) then(*side, side->stream.get());
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

void Engine::AddCopy(Operation& operation, Device::Event begun, Device::Event ended, DeviceCall copy) {
  DeviceSide* const side = device_.get();
  const auto launch = [=] {
    side->device->Wait(side->stream.get(), begun);
    copy(*side, side->stream.get());
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
  if (device_->nccl_joins_all()) {
    AddNcclStages(operation, reduce.begun, reduce.ended, [=](DeviceSide& side, Device::Stream stream) {
      if (reduce.buffer != nullptr) reduce.buffer->Register();
      side.ranks->AllReduce(reduce.in, reduce.out, reduce.count, reduce.dtype, stream);
    });
    return;
  }
  const std::size_t bytes = reduce.count * SizeOf(reduce.dtype);
  AddCopy(operation, reduce.begun, reduce.ended, [=](DeviceSide& side, Device::Stream stream) {
    side.device->CopyToHost(reduce.host, reduce.in, bytes, stream);
  });
  const auto ends = std::make_shared<const Ends>(Ends{reduce.host, reduce.host});
  AddReduceStages(operation, ends, reduce.count, reduce.dtype, 1.0, reduce.tag);
  AddCopy(operation, reduce.begun, reduce.ended, [=](DeviceSide& side, Device::Stream stream) {
    side.device->CopyFromHost(reduce.out, reduce.host, bytes, stream);
  });
}

//   NCCL inside hosts, MPI between them:
//
//   scatter: each rank of a host has a part of its sum | copy to the host | ring of the ranks with this part
//   gather:  copy back | each rank of a host has all parts
void Engine::AddScatter(Operation& operation, const DeviceReduce& reduce) {
  const std::size_t count = reduce.count / static_cast<std::size_t>(local_size_);
  const std::size_t bytes = count * SizeOf(reduce.dtype);
  char* const mine = static_cast<char*>(reduce.out) + bytes * static_cast<std::size_t>(local_rank_);
  AddNcclStages(
      operation, reduce.begun, reduce.ended,
      [=](DeviceSide& side, Device::Stream stream) {
        reduce.buffer->Register();
        side.ranks->ReduceScatter(reduce.out, reduce.count, reduce.dtype, stream);
      },
      [=](DeviceSide& side, Device::Stream stream) {
        side.device->CopyToHost(reduce.host, mine, bytes, stream);
      });
  Transport& rail = *device_->rail;
  operation.stages.push_back(
      {[=, &rail](const Operation&) { return Ring(rail, reduce.host, count, reduce.dtype, reduce.tag); },
       nullptr, nullptr});
}

void Engine::AddGather(Operation& operation, const DeviceReduce& reduce) {
  const std::size_t bytes = reduce.count / static_cast<std::size_t>(local_size_) * SizeOf(reduce.dtype);
  char* const mine = static_cast<char*>(reduce.out) + bytes * static_cast<std::size_t>(local_rank_);
  AddNcclStages(operation, reduce.begun, reduce.ended, [=](DeviceSide& side, Device::Stream stream) {
    side.device->CopyFromHost(mine, reduce.host, bytes, stream);
    side.ranks->AllGather(reduce.out, reduce.count, reduce.dtype, stream);
  });
}

std::uint64_t Engine::DeviceSignature() const {
  const DeviceSide& side = device();
  if (!side.ranks) return Hash("device memory through the host");
  return Hash(side.nccl_joins_all() ? "device memory by NCCL" : "device memory by NCCL inside hosts");
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
  try {
    // On the stream of whoever made the gradients: they may be freed or overwritten behind this.
    if (target.unpacked) on.Wait(stream, buffer.read());
    on.Move(PackPieces(layout, tensors, buffer.data()), layout.tensor_type, layout.wire_type, scale, nullptr,
            stream);
    on.Record(buffer.filled(), stream);
  } catch (const Error& error) {
    progress_->Fail(error);  // the others were told of a bucket that will not come
    throw;
  }
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
    void* const host = side.nccl_joins_all() ? nullptr : side.staging.Room(count * SizeOf(dtype));
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
  if (side.nccl_joins_all()) {
    return run([&](Operation& operation) {
      AddNcclStages(operation, begun, ended,
                    [=](DeviceSide& of, Device::Stream on) { of.ranks->Broadcast(data, bytes, root, on); });
    });
  }
  void* const host = side.staging.Room(bytes);
  if (mine) {
    run([&](Operation& operation) {
      AddCopy(operation, begun, ended,
              [=](DeviceSide& of, Device::Stream on) { of.device->CopyToHost(host, data, bytes, on); });
    });
  }
  Broadcast(host, bytes, root, what, interrupt);
  if (mine) return;
  run([&](Operation& operation) {
    AddCopy(operation, begun, ended,
            [=](DeviceSide& of, Device::Stream on) { of.device->CopyFromHost(data, host, bytes, on); });
  });
}

// A communicator that failed is ended at once, or its kernels would keep the device for ever.
void Engine::AbortDevice() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_ && device_->ranks) device_->ranks->Abort();
}

}  // namespace hvpipe
