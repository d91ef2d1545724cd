// CUDA's driver for tests without a GPU. Records which contexts were made, and on which device.
//
// It behaves as CUDA documents: only a retained primary context exists, and a call that needs a context fails
// on a thread that has none. Memory is host memory, and work is done at the call. It has the kernels that the
// PTX handed to it names, and runs them on the CPU, from the source that the PTX was compiled from. Only a
// test on a GPU can show that a real driver behaves the same. With -DOLD_DRIVER it lacks a function that
// CUDA 11.4 added.
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cast_types.h"

namespace {

using Address = unsigned long long;
using hvpipe::DType;

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoBinary = 209, kUnsupportedPtx = 222;
constexpr int kInvalidContext = 201, kNotFound = 500, kUnknown = 999;
constexpr int kDevices = 3;

std::mutex guard;
std::array<int, kDevices> retained{};
std::array<bool, kDevices> made{};
std::map<Address, int> memory;           // by address: the device it lies on; -1: page-locked
std::string failing;                     // name of the call that fails
int version = 13000;                     // the newest CUDA version that the driver supports
int loaded = 0;                          // modules
Address managed = 0;                     // an address in managed memory
thread_local std::vector<int> contexts;  // by device, the last one current

int Current() { return contexts.empty() ? -1 : contexts.back(); }
void* ContextOf(int device) { return reinterpret_cast<void*>(static_cast<std::size_t>(device) + 1); }
int DeviceOf(void* context) { return static_cast<int>(reinterpret_cast<std::size_t>(context)) - 1; }
Address At(const void* place) { return reinterpret_cast<Address>(place); }
void* Place(Address address) { return reinterpret_cast<void*>(address); }

// Every call that needs a context begins with this.
int Begin(const char* call) {
  if (Current() < 0) return kInvalidContext;
  return failing == call ? kUnknown : kSuccess;
}

int Allocate(void** out, std::size_t bytes, int device) {
  if (bytes == 0) return kInvalidValue;
  if (bytes > (1u << 30)) return kOutOfMemory;
  *out = std::malloc(bytes);
  const std::lock_guard<std::mutex> lock(guard);
  memory[At(*out)] = device;
  return kSuccess;
}

int Free(Address address) {
  const std::lock_guard<std::mutex> lock(guard);
  if (memory.erase(address) == 0) return kInvalidValue;
  std::free(Place(address));
  return kSuccess;
}

using Kernel = void (*)(const hvpipe::TileTable&, unsigned, unsigned, unsigned);

Kernel KernelNamed(const std::string& name) {  // such as hvpipe_cast_float32_bfloat16
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  Kernel found = nullptr;
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      if (name != "hvpipe_cast_" + std::string(NameOf(from)) + "_" + NameOf(to)) continue;
      hvpipe::WithTypes(from, to, [&](auto source, auto target) {
        found = hvpipe::CastTile<decltype(source), decltype(target)>;
      });
    }
  }
  return found;
}

}  // namespace

extern "C" {

bool fake_context_made(int device) { return made[static_cast<std::size_t>(device)]; }
int fake_retained(int device) { return retained[static_cast<std::size_t>(device)]; }
int fake_modules() { return loaded; }
void fake_manage(const void* place) { managed = At(place); }
int fake_current() { return Current(); }
void fake_choose(int device) { contexts.assign(1, device); }
void fake_fail(const char* call) { failing = call; }
void fake_driver(int newest) { version = newest; }

int cuGetErrorString(int code, const char** text) {
  *text = code == kUnsupportedPtx   ? "the provided PTX was compiled with an unsupported toolchain."
          : code == kInvalidContext ? "invalid device context"
                                    : "an error of the test driver";
  return kSuccess;
}
int cuInit(unsigned) { return failing == "cuInit" ? kUnknown : kSuccess; }
int cuDriverGetVersion(int* newest) {
  *newest = version;
  return kSuccess;
}
int cuDeviceGetCount(int* devices) {
  *devices = kDevices;
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
int cuDeviceGetName(char* name, int, int) {
  std::strcpy(name, "Test GPU");
  return kSuccess;
}
// Devices 1 and 2 are two parts of one board.
int cuDeviceGetPCIBusId(char* text, int, int device) {
  std::strcpy(text, device == 0 ? "0000:01:00.0" : "0000:02:00.0");
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 6 : 1;
  return kSuccess;
}
#ifndef OLD_DRIVER
int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 0x1a, 16);
  uuid[15] = static_cast<char>(0xf0 + device);
  return kSuccess;
}
#endif
int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard<std::mutex> lock(guard);
  made[static_cast<std::size_t>(device)] = true;
  ++retained[static_cast<std::size_t>(device)];
  *context = ContextOf(device);
  return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard<std::mutex> lock(guard);
  --retained[static_cast<std::size_t>(device)];
  return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) {
  if (retained[static_cast<std::size_t>(DeviceOf(context))] == 0) return kInvalidContext;
  contexts.push_back(DeviceOf(context));
  return kSuccess;
}
int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = ContextOf(contexts.back());
  contexts.pop_back();
  return kSuccess;
}
int cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return Begin("cuCtxGetStreamPriorityRange");
}

int cuMemAlloc_v2(Address* out, std::size_t bytes) {
  if (const int code = Begin("cuMemAlloc")) return code;
  void* taken = nullptr;
  const int code = Allocate(&taken, bytes, Current());
  *out = At(taken);
  return code;
}
int cuMemFree_v2(Address taken) {
  const int code = Begin("cuMemFree");
  return code ? code : Free(taken);
}
int cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
  const int code = Begin("cuMemHostAlloc");
  return code ? code : Allocate(out, bytes, -1);
}
int cuMemFreeHost(void* taken) {
  const int code = Begin("cuMemFreeHost");
  return code ? code : Free(At(taken));
}
int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = 300'000'000;
  *total = 1'000'000'000;
  return Begin("cuMemGetInfo");
}
int cuMemGetAddressRange_v2(Address* first, std::size_t* bytes, Address of) {
  *first = of;
  *bytes = 512;
  return Begin("cuMemGetAddressRange");
}
int cuMemsetD8Async(Address of, unsigned char value, std::size_t bytes, void*) {
  std::memset(Place(of), value, bytes);
  return Begin("cuMemsetD8Async");
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t bytes, void*) {
  if (bytes == 0) return kInvalidValue;
  std::memcpy(to, Place(from), bytes);
  return Begin("cuMemcpyDtoHAsync");
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t bytes, void*) {
  if (bytes == 0) return kInvalidValue;
  std::memcpy(Place(to), from, bytes);
  return Begin("cuMemcpyHtoDAsync");
}
int cuPointerGetAttributes(unsigned count, int* attributes, void** data, Address of) {
  const auto found = memory.find(of);
  const bool known = found != memory.end();
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == 2) *static_cast<unsigned*>(data[i]) = known ? (found->second < 0 ? 1 : 2) : 0;
    if (attributes[i] == 8) *static_cast<unsigned char*>(data[i]) = of == managed;
    if (attributes[i] == 9) *static_cast<int*>(data[i]) = known ? found->second : 0;
  }
  return Begin("cuPointerGetAttributes");
}

int cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
  *stream = nullptr;
  return priority == -5 ? Begin("cuStreamCreateWithPriority") : kInvalidValue;
}
int cuStreamDestroy_v2(void*) { return Begin("cuStreamDestroy"); }
int cuStreamSynchronize(void*) { return Begin("cuStreamSynchronize"); }
int cuStreamWaitEvent(void*, void*, unsigned) { return Begin("cuStreamWaitEvent"); }
int cuEventCreate(void** event, unsigned) {
  *event = nullptr;
  return Begin("cuEventCreate");
}
int cuEventDestroy_v2(void*) { return Begin("cuEventDestroy"); }
int cuEventRecord(void*, void*) { return Begin("cuEventRecord"); }
int cuEventQuery(void*) { return Begin("cuEventQuery"); }

// A module is the text of its PTX.
int cuModuleLoadData(void** module, const void* image) {
  if (const int code = Begin("cuModuleLoadData")) return code == kUnknown ? kUnsupportedPtx : code;
  *module = new std::string(static_cast<const char*>(image));
  ++loaded;
  return kSuccess;
}
int cuModuleUnload(void* module) {
  if (const int code = Begin("cuModuleUnload")) return code;
  delete static_cast<std::string*>(module);
  --loaded;
  return kSuccess;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (const int code = Begin("cuModuleGetFunction")) return code == kUnknown ? kNoBinary : code;
  const auto& ptx = *static_cast<std::string*>(module);
  if (ptx.find(".visible .entry " + std::string(name) + "(") == std::string::npos) return kNotFound;
  const Kernel kernel = KernelNamed(name);
  *function = reinterpret_cast<void*>(kernel);
  return kernel != nullptr ? kSuccess : kNotFound;
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned, void*, void** arguments, void**) {
  if (const int code = Begin("cuLaunchKernel")) return code;
  const auto& table = *static_cast<const hvpipe::TileTable*>(arguments[0]);
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < threads; ++thread) {
      reinterpret_cast<Kernel>(function)(table, block, thread, threads);
    }
  }
  return kSuccess;
}
}
