// Adds the stages of an all-reduce of device memory to an operation.
#include "gpu/device_reduce.h"

#include <memory>
#include <utility>

#include "gpu/device_stages.h"

namespace hvpipe {

DeviceReduce ReduceOf(DeviceBuffer& buffer, DType dtype, int tag) {
  return {buffer.data(),   buffer.data(),  buffer.host(), buffer.count(), dtype,
          buffer.filled(), buffer.moved(), tag,           &buffer};
}

void DeviceReducer::AddNcclLaunch(Operation& operation, Device::Event begun, Enqueue call, Enqueue after) {
  RankDevice* const device = &device_;
  auto called = std::make_shared<bool>(false);
  const auto launch = [=] {
    const Device::Stream stream = device->stream.get();
    const bool first = !std::exchange(*called, true);
    if (first) {
      const CurrentDevice current(*device->device);
      device->device->Wait(stream, begun);
      call(stream);
    }
    // NCCL may still be launching in a thread of its own.
    if (!(first ? device->ranks->ReadySoon() : device->ranks->Ready())) return false;
    after(stream);
    return true;
  };
  operation.AddStage([=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); },
                     &device_.order);
}

void DeviceReducer::AddNccl(Operation& operation, Device::Event begun, Device::Event ended, Enqueue call) {
  Device* const device = device_.device.get();
  AddNcclLaunch(operation, begun, std::move(call),
                [=](Device::Stream stream) { device->Record(ended, stream); });
  AddArrival(operation, *device_.device, device_.ranks.get(), ended);
}

void DeviceReducer::AddCopy(Operation& operation, Device::Stream stream, Device::Event begun,
                            Device::Event ended, Enqueue copy) {
  Device* const device = device_.device.get();
  const auto launch = [=] {
    device->Wait(stream, begun);
    copy(stream);
    device->Record(ended, stream);
    return true;
  };
  operation.AddStage([=](const Operation&) { return std::make_unique<DeviceLaunch>(launch); });
  AddArrival(operation, *device_.device, device_.ranks.get(), ended);
}

void DeviceReducer::AddAllReduce(Operation& operation, const DeviceReduce& reduce) {
  if (route_.topology().size == 1) return;
  RankDevice* const device = &device_;
  if (device->nccl_connects_all()) {
    AddNccl(operation, reduce.begun, reduce.ended, [=](Device::Stream stream) {
      device->ranks->AllReduce(reduce.in, reduce.out, reduce.count, reduce.dtype, stream);
    });
    return;
  }
  const std::size_t bytes = reduce.count * SizeOf(reduce.dtype);
  // Two streams: the next bucket's copy to the host waits until the bucket is packed.
  AddCopy(operation, device->stream.get(), reduce.begun, reduce.ended,
          [=](Device::Stream stream) { device->device->CopyToHost(reduce.host, reduce.in, bytes, stream); });
  const ReduceBuffers buffers{reduce.host, reduce.host, reduce.count};
  route_.AddStages(operation, std::make_shared<const ReduceBuffers>(buffers), reduce.dtype, 1.0, reduce.tag);
  AddCopy(operation, device->upload_stream.get(), reduce.begun, reduce.ended, [=](Device::Stream stream) {
    device->device->CopyFromHost(reduce.out, reduce.host, bytes, stream);
  });
}

void DeviceReducer::AddScatter(Operation& operation, const DeviceReduce& reduce) {
  RankDevice* const device = &device_;
  const auto scatter = [=](Device::Stream stream) {
    reduce.buffer->Register();
    device->ranks->ReduceScatter(reduce.out, reduce.count, reduce.dtype, stream);
  };
  // The gather comes behind it on the same stream.
  AddNcclLaunch(operation, reduce.begun, scatter, [](auto) {});
}

void DeviceReducer::AddGather(Operation& operation, const DeviceReduce& reduce, Device::Event ended) {
  RankDevice* const device = &device_;
  AddNcclLaunch(
      operation, reduce.begun,
      [=](Device::Stream stream) {
        device->ranks->AllGather(reduce.out, reduce.count, reduce.dtype, stream);
      },
      [=](Device::Stream stream) {
        device->device->Record(reduce.ended, stream);
        device->device->Record(ended, stream);
      });
}

}  // namespace hvpipe
