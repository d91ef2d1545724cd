// Runs csrc/device/cuda_device.cc on the CUDA of fake_cuda.cc: each case prints its findings.
//
//   cuda_device_driver CASE
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>
#include <thread>

#include "core/error.h"
#include "device/device.h"
#include "device/kernels.h"

extern "C" {
bool fake_context_made(int device);
int fake_current();
cudaError_t fake_last_error();
void fake_fail(const char* call);
void fake_driver(int version);
hvpipe::Device* hvpipe_open_device(int ordinal, int version);
}

namespace hvpipe {
bool kernels_missing = false;
cudaError_t LoadKernels() { return kernels_missing ? cudaErrorNoKernelImageForDevice : cudaSuccess; }
cudaError_t LaunchScaleAndCast(const std::vector<Device::Piece>&, DType, DType, double, cudaStream_t) {
  return cudaSuccess;
}
}  // namespace hvpipe

namespace {

using hvpipe::Device;

std::unique_ptr<Device> Open(int ordinal) {
  return std::unique_ptr<Device>(hvpipe_open_device(ordinal, hvpipe::kDeviceInterface));
}

// Makes each kind of call on a thread that never chose a device, as the progress thread and TensorFlow's threads do.
void Contexts() {
  const auto on_fresh_thread = [](const auto& call) {
    std::thread([&] {
      call();
      std::printf("current afterwards: %d\n", fake_current());
    }).join();
  };
  std::unique_ptr<Device> device;
  Device::Event event = nullptr;
  Device::Stream stream = nullptr;
  void *memory = nullptr, *host = nullptr;
  on_fresh_thread([&] { device = Open(1); });
  on_fresh_thread([&] { memory = device->Allocate(16); });
  on_fresh_thread([&] { host = device->AllocateHost(16); });
  on_fresh_thread([&] { stream = device->MakeStream(); });
  on_fresh_thread([&] { event = device->MakeEvent(); });
  on_fresh_thread([&] { device->Record(event, stream); });
  on_fresh_thread([&] { device->Wait(stream, event); });
  on_fresh_thread([&] { device->Reached(event); });
  on_fresh_thread([&] { device->CopyToHost(host, memory, 16, stream); });
  on_fresh_thread([&] { device->CopyFromHost(memory, host, 16, stream); });
  on_fresh_thread([&] { device->ScaleAndCast({}, hvpipe::DType::kFloat32, hvpipe::DType::kFloat32, 1, stream); });
  on_fresh_thread([&] { const hvpipe::CurrentDevice current(*device); });
  on_fresh_thread([&] { device->Free(memory); });
  on_fresh_thread([&] { device->FreeHost(host); });
  on_fresh_thread([&] { device->DestroyStream(stream); });
  on_fresh_thread([&] { device->DestroyEvent(event); });
  on_fresh_thread([&] { device.reset(); });
  for (int ordinal = 0; ordinal < 3; ++ordinal) {
    std::printf("context on device %d: %d\n", ordinal, fake_context_made(ordinal));
  }
}

// A thread whose current device is another one keeps it.
void Kept() {
  const auto device = Open(1);
  cudaSetDevice(2);
  device->Free(device->Allocate(16));
  {
    const hvpipe::CurrentDevice outer(*device), inner(*device);
    std::printf("inside: %d\n", fake_current());
  }
  std::printf("afterwards: %d\n", fake_current());
}

// A failure to give something back does not become the error of the next call.
void Stale() {
  const auto device = Open(1);
  const Device::Event event = device->MakeEvent();
  fake_fail("cudaEventDestroy");
  device->DestroyEvent(event);
  std::printf("last error: %d\n", fake_last_error());
}

// Accepts memory of this device only.
void Here() {
  const auto first = Open(0), second = Open(1);
  char plain = 0;
  const auto look = [&](const char* what, const void* memory) {
    try {
      second->CheckIsHere(memory);
      std::printf("%s: taken\n", what);
    } catch (const hvpipe::Error& error) {
      std::printf("%s: %s\n", what, error.what());
    }
  };
  look("its own", second->Allocate(16));
  look("another's", first->Allocate(16));
  look("host", &plain);
  look("page-locked", second->AllocateHost(16));
}

// Too little memory: fake_cuda has 1 GB.
void Full() {
  const auto device = Open(1);
  const Device::MemorySize memory = device->FreeMemory();
  std::printf("%zu of %zu\n", memory.free, memory.total);
  std::printf("%zu taken\n", device->AllocatedBytes(device->Allocate(16)));
  std::printf("null: %d\n", device->Allocate(2u << 30) == nullptr);
  std::printf("last error: %d\n", fake_last_error());
  device->AllocateHost(2u << 30);
}

void Names() {
  for (int ordinal = 0; ordinal < 3; ++ordinal) {
    const auto device = Open(ordinal);
    const Device::Identity identity = device->Identify();
    std::printf("%s | %s | %s\n", device->Name().c_str(), identity.device.c_str(), identity.board.c_str());
  }
  hvpipe::kernels_missing = true;
  Open(0);
}

// Opens a device with a driver that supports CUDA up to this version.
void With(int driver) {
  std::printf("built with CUDA %d.%d\n", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  fake_driver(driver);
  try {
    Open(0);
  } catch (const hvpipe::Error&) {
    std::printf("last error: %d\n", fake_last_error());
    throw;
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string wanted = argv[1];
  try {
    if (wanted == "contexts") Contexts();
    if (wanted == "kept") Kept();
    if (wanted == "stale") Stale();
    if (wanted == "here") Here();
    if (wanted == "full") Full();
    if (wanted == "names") Names();
    if (wanted == "old driver") With(11030);
    if (wanted == "no driver") With(0);
  } catch (const hvpipe::Error& error) {
    std::printf("error %d: %s\n", static_cast<int>(error.kind()), error.what());
  }
  return 0;
}
