// Runs blocking collectives of device memory: by NCCL, or through host memory.
#include "gpu/device_calls.h"

namespace hvpipe {

void DeviceCalls::RunOn(RankDevice& device, const std::string& what, const Interrupt& interrupt,
                        const std::function<void(DeviceReducer& reducer, Operation& operation)>& add_stages) {
  auto operation = BlockingCalls::MakeOperation(what);
  DeviceReducer reducer(device, route_);
  add_stages(reducer, *operation);
  progress_.Run(operation, interrupt);
}

void DeviceCalls::AllReduce(const void* in, void* out, std::size_t count, DType dtype, double scale,
                            const std::string& what, Device::Stream stream, const Interrupt& interrupt) {
  RankDevice& device = device_.get();
  const Turns::Turn turn = calls_.TakeTurn(interrupt);
  device.CheckIsHere(in, count);
  device.CheckIsHere(out, count);
  if (route_.topology().size > 1) {
    calls_.CheckSameCall(what, interrupt);
    void* const host = device.nccl_connects_all() ? nullptr : device.staging.AtLeast(count * SizeOf(dtype));
    if (dtype == DType::kFloat16 && scale != 1.0) {  // scale first: the sum may exceed the range of float16
      device.device->ScaleAndCast({{in, out, count}}, dtype, dtype, scale, stream);
      in = out;
      scale = 1.0;
    }
    const Device::Event begun = device.begun.get(), ended = device.ended.get();
    device.device->Record(begun, stream);
    const DeviceReduce reduce{in, out, host, count, dtype, begun, ended, calls_.NextTag()};
    RunOn(device, what, interrupt, [&](DeviceReducer& reducer, Operation& operation) {
      operation.traced = "reduce";
      reducer.AddAllReduce(operation, reduce);
    });
    in = out;
  }
  if (in == out && scale == 1.0) return;
  device.device->ScaleAndCast({{in, out, count}}, dtype, dtype, scale, stream);
}

void DeviceCalls::Broadcast(void* data, std::size_t bytes, int root, const std::string& what,
                            Device::Stream stream, const Interrupt& interrupt) {
  RankDevice& device = device_.get();
  device.CheckIsHere(data, bytes);
  if (route_.topology().size == 1) return;
  const Turns::Turn turn = calls_.TakeTurn(interrupt);
  calls_.CheckSameCall(what, interrupt);
  const Device::Event begun = device.begun.get(), ended = device.ended.get();
  device.device->Record(begun, stream);
  if (device.nccl_connects_all()) {
    return RunOn(device, what, interrupt, [&](DeviceReducer& reducer, Operation& operation) {
      reducer.AddNccl(operation, begun, ended,
                      [=, &device](Device::Stream on) { device.ranks->Broadcast(data, bytes, root, on); });
    });
  }
  const bool is_root = route_.topology().rank == root;
  void* const host = device.staging.AtLeast(bytes);
  const auto copy = [&](const DeviceReducer::Enqueue& enqueue) {
    RunOn(device, what, interrupt, [&](DeviceReducer& reducer, Operation& operation) {
      reducer.AddCopy(operation, device.stream.get(), begun, ended, enqueue);
    });
  };
  if (is_root) copy([&](Device::Stream on) { device.device->CopyToHost(host, data, bytes, on); });
  calls_.Broadcast(host, bytes, root, what, interrupt);
  if (!is_root) copy([&](Device::Stream on) { device.device->CopyFromHost(data, host, bytes, on); });
}

}  // namespace hvpipe
