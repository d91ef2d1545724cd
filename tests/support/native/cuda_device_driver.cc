// Runs csrc/gpu/cuda_device.cc on the CUDA of fake_cuda.cc: each case prints its findings.
//
//   cuda_device_driver CASE
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/kernels.h"

extern "C" {
bool fake_context_made(int device);
int fake_retained(int device);
int fake_modules();
int fake_current();
void fake_choose(int device);
void fake_manage(const void* place);
void fake_fail(const char* call);
void fake_driver(int version);
hvpipe::Device* hvpipe_open_device(int ordinal, int version);
}

namespace {
std::string TextOf(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
const std::string ptx = TextOf(HVPIPE_PTX);
}  // namespace
namespace hvpipe {
const char* const kKernels = ptx.c_str();
}

namespace {

using hvpipe::Device;

std::unique_ptr<Device> Open(int ordinal) {
  return std::unique_ptr<Device>(hvpipe_open_device(ordinal, hvpipe::kDeviceInterface));
}

// Makes each kind of call on a thread that never chose a device, as the progress thread and TensorFlow's
// threads do.
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
  device->CopyToHost(nullptr, nullptr, 0, stream);
  device->CopyFromHost(nullptr, nullptr, 0, stream);
  on_fresh_thread([&] {
    device->ScaleAndCast({{memory, memory, 4}}, hvpipe::DType::kFloat32, hvpipe::DType::kFloat32, 1, stream);
  });
  on_fresh_thread([&] { const hvpipe::CurrentDevice current(*device); });
  on_fresh_thread([&] { device->Free(memory); });
  on_fresh_thread([&] { device->FreeHost(host); });
  on_fresh_thread([&] { device->DestroyStream(stream); });
  on_fresh_thread([&] { device->DestroyEvent(event); });
  on_fresh_thread([&] { device.reset(); });
  for (int ordinal = 0; ordinal < 3; ++ordinal) {
    std::printf("context on device %d: made %d, held %d\n", ordinal, fake_context_made(ordinal),
                fake_retained(ordinal));
  }
  std::printf("modules: %d\n", fake_modules());
}

// A thread whose current device is another one keeps it.
void Kept() {
  const auto device = Open(1);
  fake_choose(2);
  device->Free(device->Allocate(16));
  {
    const hvpipe::CurrentDevice outer(*device), inner(*device);
    std::printf("inside: %d\n", fake_current());
  }
  std::printf("afterwards: %d\n", fake_current());
}

// Casts between all types that buckets and gradients have, several tensors at once.
void Casts() {
  using hvpipe::DType;
  const auto device = Open(1);
  const DType types[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  // 2 in each type.
  const std::vector<std::vector<unsigned char>> two = {
      {0, 0, 0, 0x40}, {0, 0, 0, 0, 0, 0, 0, 0x40}, {0, 0x40}, {0, 0x40}};
  for (std::size_t from = 0; from < 4; ++from) {
    for (std::size_t to = 0; to < 4; ++to) {
      if ((types[from] == DType::kFloat64) != (types[to] == DType::kFloat64)) continue;
      auto* const input = static_cast<unsigned char*>(device->Allocate(64));
      auto* const output = static_cast<unsigned char*>(device->Allocate(64));
      const std::size_t wide = two[from].size(), narrow = two[to].size();
      for (std::size_t i = 0; i < 5 * wide; ++i) input[i] = two[from][i % wide];
      device->ScaleAndCast(
          {{input, output, 2}, {input, output + 3 * narrow, 0}, {input, output + 2 * narrow, 3}}, types[from],
          types[to], 1, nullptr);
      bool right = true;
      for (std::size_t i = 0; i < 64; ++i)
        right = right && output[i] == (i < 5 * narrow ? two[to][i % narrow] : 0);
      std::printf("%s to %s: %s\n", hvpipe::NameOf(types[from]), hvpipe::NameOf(types[to]),
                  right ? "right" : "wrong");
    }
  }
  device->ScaleAndCast({}, DType::kFloat32, DType::kFloat64, 1, nullptr);
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
  fake_manage(&plain);
  look("managed", &plain);
}

// Too little memory: fake_cuda has 1 GB.
void Full() {
  const auto device = Open(1);
  const Device::MemorySize memory = device->FreeMemory();
  std::printf("%zu of %zu\n", memory.free, memory.total);
  std::printf("%zu taken\n", device->AllocatedBytes(device->Allocate(16)));
  std::printf("null: %d\n", device->Allocate(2u << 30) == nullptr);
  device->AllocateHost(2u << 30);
}

void Names() {
  for (int ordinal = 0; ordinal < 3; ++ordinal) {
    const auto device = Open(ordinal);
    const Device::Identity identity = device->Identify();
    std::printf("%s | %s | %s\n", device->Name().c_str(), identity.device.c_str(), identity.board.c_str());
  }
}

// Opens a device where this call fails.
void Without(const char* call) {
  fake_fail(call);
  try {
    Open(0);
  } catch (const hvpipe::Error&) {
    std::printf("held %d, modules %d\n", fake_retained(0), fake_modules());
    throw;
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string wanted = argv[1];
  try {
    if (wanted == "contexts") Contexts();
    if (wanted == "kept") Kept();
    if (wanted == "casts") Casts();
    if (wanted == "here") Here();
    if (wanted == "full") Full();
    if (wanted == "names") Names();
    if (wanted == "old driver") fake_driver(11030);
    if (wanted == "old driver") Open(0);
    if (wanted.rfind("cu", 0) == 0) Without(wanted.c_str());
  } catch (const hvpipe::Error& error) {
    std::printf("error %d: %s\n", static_cast<int>(error.kind()), error.what());
  }
  return 0;
}
