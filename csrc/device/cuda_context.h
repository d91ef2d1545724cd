// The context of a GPU, which CUDA's driver makes current on a thread.
#pragma once

#include <cuda.h>

#include <string>

namespace hvpipe {

// The primary context of a device, which CUDA's runtime and all frameworks use. It exists at least as long as
// this object.
//
// cudaSetDevice is not enough: it makes a context (some 0.5 GB) on the device it is given. For a thread that
// never chose a device the runtime reports device 0, so restoring that would make a context there. The driver
// can restore "no context".
class CudaContext {
 public:
  explicit CudaContext(int ordinal);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  // Make it current on this thread until Leave restores the previous context. Calls nest.
  void Enter() const;
  bool TryEnter() const noexcept;
  void Leave() const noexcept;

  // 32 hexadecimal digits, unique to this GPU or this part of a GPU.
  std::string Uuid() const;
  // The size of the allocation around this address of device memory. The context must be current.
  std::size_t AllocatedBytes(const void* memory) const;

 private:
  void Check(CUresult code, const char* call) const;

  CUresult (*init_)(unsigned) = nullptr;
  CUresult (*get_)(CUdevice*, int) = nullptr;
  CUresult (*retain_)(CUcontext*, CUdevice) = nullptr;
  CUresult (*release_)(CUdevice) = nullptr;
  CUresult (*push_)(CUcontext) = nullptr;
  CUresult (*pop_)(CUcontext*) = nullptr;
  CUresult (*uuid_)(CUuuid*, CUdevice) = nullptr;
  CUresult (*range_)(CUdeviceptr*, std::size_t*, CUdeviceptr) = nullptr;
  CUresult (*error_text_)(CUresult, const char**) = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

}  // namespace hvpipe
