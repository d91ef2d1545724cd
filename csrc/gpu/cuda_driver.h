// CUDA's driver, loaded at run time: the functions that hvpipe uses.
#pragma once

#include <cstddef>
#include <string>

namespace hvpipe {

// The parts of cuda.h that hvpipe uses, so that it builds without CUDA. tests/csrc/gpu/test_cuda_device.py
// compares them with a real header.
// Source: https://docs.nvidia.com/cuda/cuda-driver-api/
namespace cuda {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kNotReady = 600;

constexpr int kMajorOfDevice = 75;  // attributes of a device
constexpr int kMinorOfDevice = 76;
constexpr int kTypeOfPointer = 2;  // attributes of a pointer
constexpr int kIsManaged = 8;
constexpr int kDeviceOfPointer = 9;
constexpr unsigned kDeviceMemory = 2;  // a type of a pointer
constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kPortableHostMemory = 1;

using Address = unsigned long long;
using Stream = void*;
inline Stream LegacyStream() { return reinterpret_cast<Stream>(1); }
struct Uuid {
  char bytes[16];
};

// Name without "cu", the library's name, then the parameter types. Each function returns a result code.
#define HVPIPE_CUDA_FUNCTIONS(X)                                                                     \
  X(DriverGetVersion, cuDriverGetVersion, int*)                                                      \
  X(Init, cuInit, unsigned)                                                                          \
  X(DeviceGetCount, cuDeviceGetCount, int*)                                                          \
  X(DeviceGet, cuDeviceGet, int*, int)                                                               \
  X(DeviceGetName, cuDeviceGetName, char*, int, int)                                                 \
  X(DeviceGetPCIBusId, cuDeviceGetPCIBusId, char*, int, int)                                         \
  X(DeviceGetUuid, cuDeviceGetUuid_v2, ::hvpipe::cuda::Uuid*, int)                                   \
  X(DeviceGetAttribute, cuDeviceGetAttribute, int*, int, int)                                        \
  X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, void**, int)                                   \
  X(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, int)                                      \
  X(CtxPushCurrent, cuCtxPushCurrent_v2, void*)                                                      \
  X(CtxPopCurrent, cuCtxPopCurrent_v2, void**)                                                       \
  X(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, int*, int*)                              \
  X(PointerGetAttributes, cuPointerGetAttributes, unsigned, int*, void**, ::hvpipe::cuda::Address)   \
  X(MemGetInfo, cuMemGetInfo_v2, std::size_t*, std::size_t*)                                         \
  X(MemGetAddressRange, cuMemGetAddressRange_v2, ::hvpipe::cuda::Address*, std::size_t*,             \
    ::hvpipe::cuda::Address)                                                                         \
  X(MemAlloc, cuMemAlloc_v2, ::hvpipe::cuda::Address*, std::size_t)                                  \
  X(MemFree, cuMemFree_v2, ::hvpipe::cuda::Address)                                                  \
  X(MemHostAlloc, cuMemHostAlloc, void**, std::size_t, unsigned)                                     \
  X(MemFreeHost, cuMemFreeHost, void*)                                                               \
  X(MemsetD8Async, cuMemsetD8Async, ::hvpipe::cuda::Address, unsigned char, std::size_t, void*)      \
  X(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, void*, ::hvpipe::cuda::Address, std::size_t, void*)       \
  X(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, ::hvpipe::cuda::Address, const void*, std::size_t, void*) \
  X(StreamCreateWithPriority, cuStreamCreateWithPriority, void**, unsigned, int)                     \
  X(StreamDestroy, cuStreamDestroy_v2, void*)                                                        \
  X(StreamSynchronize, cuStreamSynchronize, void*)                                                   \
  X(StreamWaitEvent, cuStreamWaitEvent, void*, void*, unsigned)                                      \
  X(EventCreate, cuEventCreate, void**, unsigned)                                                    \
  X(EventDestroy, cuEventDestroy_v2, void*)                                                          \
  X(EventRecord, cuEventRecord, void*, void*)                                                        \
  X(EventQuery, cuEventQuery, void*)                                                                 \
  X(ModuleLoadData, cuModuleLoadData, void**, const void*)                                           \
  X(ModuleUnload, cuModuleUnload, void*)                                                             \
  X(ModuleGetFunction, cuModuleGetFunction, void**, void*, const char*)                              \
  X(LaunchKernel, cuLaunchKernel, void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
    unsigned, void*, void**, void**)                                                                 \
  X(GetErrorString, cuGetErrorString, int, const char**)

}  // namespace cuda

// Any thread may call. The library stays loaded.
class CudaDriver {
 public:
  // Throws if there is no driver, or it is too old for hvpipe's kernels, or it does not start.
  static const CudaDriver& Get();

  // "12.4": the newest CUDA that the driver supports.
  std::string Version() const;
  std::string TextOf(int code) const;
  // Throws the driver's text, unless `code` is success.
  void Check(int code, const char* call) const;

#define HVPIPE_CUDA_POINTER(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
  HVPIPE_CUDA_FUNCTIONS(HVPIPE_CUDA_POINTER)
#undef HVPIPE_CUDA_POINTER

 private:
  CudaDriver();
};

}  // namespace hvpipe
