// CUDA's driver and runtime for tests without a GPU. Records which contexts were made, and on which device.
//
// It behaves as CUDA documents: a runtime call on a thread without a context makes one on the device that the thread
// chose, or on device 0. Choosing a device makes a context there. Driver calls make contexts only when they retain them.
// Memory is host memory. Only a test on a GPU can show that a real driver behaves the same.
// With -DOLD_DRIVER it lacks a function that CUDA 11.4 added.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kDevices = 3;
std::mutex guard;
std::array<bool, kDevices> made{};
std::map<const void*, int> memory;  // by address: the device it lies on
std::string failing;                // name of the call that fails
int driver = CUDART_VERSION;        // the newest CUDA version that the driver supports; 0: no driver

thread_local int chosen = 0;
thread_local std::vector<int> contexts;  // by device, the last one current
thread_local cudaError_t last = cudaSuccess;

int Current() { return contexts.empty() ? -1 : contexts.back(); }

void Make(int device) {
  const std::lock_guard<std::mutex> lock(guard);
  made[static_cast<std::size_t>(device)] = true;
}

cudaError_t Outcome(cudaError_t code) {
  if (code != cudaSuccess) last = code;
  return code;
}

// Every runtime call begins with this.
cudaError_t Begin(const char* call) {
  if (Current() < 0) {
    Make(chosen);
    contexts.push_back(chosen);
  }
  return Outcome(failing == call ? cudaErrorUnknown : cudaSuccess);
}

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(static_cast<std::size_t>(device) + 1); }

int DeviceOf(CUcontext context) { return static_cast<int>(reinterpret_cast<std::size_t>(context)) - 1; }

cudaError_t Allocate(const char* call, void** out, std::size_t bytes, int device) {
  if (const cudaError_t code = Begin(call)) return code;
  if (bytes > (1u << 30)) return Outcome(cudaErrorMemoryAllocation);
  *out = std::malloc(bytes);
  const std::lock_guard<std::mutex> lock(guard);
  memory[*out] = device;
  return cudaSuccess;
}

cudaError_t Free(const char* call, void* taken) {
  if (const cudaError_t code = Begin(call)) return code;
  const std::lock_guard<std::mutex> lock(guard);
  memory.erase(taken);
  std::free(taken);
  return cudaSuccess;
}

}  // namespace

extern "C" {

bool fake_context_made(int device) { return made[static_cast<std::size_t>(device)]; }
int fake_current() { return Current(); }
cudaError_t fake_last_error() { return last; }
void fake_fail(const char* call) { failing = call; }
void fake_driver(int version) { driver = version; }

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the test driver";
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Make(device);
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(DeviceOf(context));
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = ContextOf(contexts.back());
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* first, std::size_t* bytes, CUdeviceptr of) {
  *first = of;
  *bytes = 512;
  return CUDA_SUCCESS;
}
#ifndef OLD_DRIVER
// Devices 1 and 2 are two parts of one board.
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  std::memset(uuid->bytes, 0x1a, sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>(0xf0 + device);
  return CUDA_SUCCESS;
}
#endif

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorInsufficientDriver ? "the driver is too old for the test runtime"
                                             : "an error of the test runtime";
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfATest"; }
cudaError_t cudaGetLastError() {
  const cudaError_t code = last;
  last = cudaSuccess;
  return code;
}
cudaError_t cudaGetDeviceCount(int* devices) {
  *devices = kDevices;
  return Outcome(driver < CUDART_VERSION ? cudaErrorInsufficientDriver : cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "Test GPU");
  properties->major = 6;
  properties->minor = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int, int device) {
  std::strcpy(text, device == 0 ? "0000:01:00.0" : "0000:02:00.0");
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = Current() < 0 ? chosen : Current();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  chosen = device;
  Make(device);
  if (!contexts.empty()) contexts.pop_back();
  contexts.push_back(device);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** out, std::size_t bytes) { return Allocate("cudaMalloc", out, bytes, Current()); }
cudaError_t cudaFree(void* taken) { return Free("cudaFree", taken); }
cudaError_t cudaHostAlloc(void** out, std::size_t bytes, unsigned) {
  return Allocate("cudaHostAlloc", out, bytes, -1);
}
cudaError_t cudaFreeHost(void* taken) { return Free("cudaFreeHost", taken); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = 300'000'000;
  *total = 1'000'000'000;
  return Begin("cudaMemGetInfo");
}
cudaError_t cudaMemsetAsync(void* of, int value, std::size_t bytes, cudaStream_t) {
  std::memset(of, value, bytes);
  return Begin("cudaMemsetAsync");
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return Begin("cudaMemcpyAsync");
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* of) {
  *attributes = {};
  const auto found = memory.find(of);
  attributes->type = found == memory.end() ? cudaMemoryTypeUnregistered
                                           : (found->second < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice);
  attributes->device = found == memory.end() ? -2 : found->second;
  return Begin("cudaPointerGetAttributes");
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return Begin("cudaStreamSynchronize"); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = *highest = 0;
  return Begin("cudaDeviceGetStreamPriorityRange");
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = nullptr;
  return Begin("cudaStreamCreateWithPriority");
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return Begin("cudaStreamDestroy"); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return Begin("cudaStreamWaitEvent"); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return Begin("cudaEventCreateWithFlags");
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return Begin("cudaEventDestroy"); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return Begin("cudaEventRecord"); }
cudaError_t cudaEventQuery(cudaEvent_t) { return Begin("cudaEventQuery"); }
}
