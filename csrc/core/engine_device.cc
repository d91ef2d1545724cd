// Device memory in the engine: buckets and blocking collectives, by NCCL or through the host to MPI.
#include <utility>

#include "core/engine.h"

namespace hvpipe {

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
  AddArrival(operation, event, device_->ranks.get());
}

// `ranks`: of which the event may have to wait for others; null for none.
void Engine::AddArrival(Operation& operation, Device::Event event, NcclCommunicator* ranks) {
  Device* const on = device_->device.get();
  operation.stages.push_back(
      {[=](const Operation&) { return std::make_unique<DeviceArrival>(*on, ranks, event); }, nullptr,
       nullptr});
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
  const auto ends = std::make_shared<const Ends>(Ends{reduce.host, reduce.host, reduce.count});
  AddReduceStages(operation, ends, reduce.dtype, 1.0, reduce.tag);
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

// In its turn among NCCL's collectives, which only the driving thread may call, and of this rank alone.
std::shared_ptr<Operation> Engine::Removal(std::shared_ptr<Plan> plan) {
  DeviceSide* const side = device_.get();
  auto operation = std::make_shared<Operation>();
  operation->what = "end of " + plan->name;
  operation->of_all_ranks = false;
  const auto remove = [side, plan = std::move(plan)] {
    if (side->ranks && !side->ranks->Ready()) return false;
    for (const auto& bucket : plan->buckets) {
      if (bucket->unpacked && !side->device->Reached(bucket->device->read())) return false;
    }
    for (const auto& bucket : plan->buckets) bucket->device->Deregister();
    return true;  // and with the operation the plan ends
  };
  operation->stages.push_back({[remove](const Operation&) { return std::make_unique<DeviceLaunch>(remove); },
                               side->ranks ? &side->order : nullptr, nullptr});
  return operation;
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

void Engine::CheckIsHere(const void* array, std::size_t count) {
  if (count > 0) device().device->CheckIsHere(array);
}

void Engine::SubmitDevice(int plan, int index, const std::vector<const void*>& tensors, double scale,
                          Device::Stream stream) {
  Bucket& target = bucket(plan, index);
  DeviceBuffer& buffer = DeviceBufferOf(target);
  Device& on = *device().device;
  const BucketLayout& layout = target.layout;
  const std::shared_ptr<Operation> operation = Claim(target);
  try {
    if (!std::exchange(target.packs_here, true)) {
      for (std::size_t i = 0; i < tensors.size(); ++i) CheckIsHere(tensors[i], layout.counts[i]);
    }
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
  if (const auto error = progress_->error()) throw *error;
}

void Engine::UnpackDevice(int plan, int index, const std::vector<void*>& tensors, Device::Stream stream) {
  Bucket& source = bucket(plan, index);
  DeviceBuffer& buffer = DeviceBufferOf(source);
  Device& on = *device().device;
  const BucketLayout& layout = source.layout;
  if (!std::exchange(source.unpacks_here, true)) {
    for (std::size_t i = 0; i < tensors.size(); ++i) CheckIsHere(tensors[i], layout.counts[i]);
  }
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
  CheckIsHere(in, count);
  CheckIsHere(out, count);
  if (size_ > 1) {
    progress_->Run(Checked(what), interrupt);
    void* const host = side.nccl_joins_all() ? nullptr : side.staging.Room(count * SizeOf(dtype));
    if (dtype == DType::kFloat16 && scale != 1.0) {  // its sum may be more than the type holds
      side.device->Move({{in, out, count}}, dtype, dtype, scale, nullptr, stream);
      in = out;
      scale = 1.0;
    }
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
  CheckIsHere(data, bytes);
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

// A communicator that failed is ended, or its kernels would keep the device for ever.
void Engine::AbortDevice() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!device_) return;
  for (NcclCommunicator* const communicator : device_->communicators()) communicator->Abort();
}

}  // namespace hvpipe
