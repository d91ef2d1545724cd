// A GPU's context, made current on a thread by CUDA's driver.
#pragma once

#include <cuda.h>

#include <string>

namespace hvpipe {

// The primary context of a device, the one that CUDA's runtime and all frameworks use; it lives as long as
// this, at least.
//
// The runtime's own cudaSetDevice will not do: it makes a context (some 0.5 GB) on whichever device it is
// given. A thread that never chose one is said to have device 0 before, and to put that back would make a
// context there. The driver knows a thread without any, and leaves it so.
class CudaContext {
 public:
  explicit CudaContext(int ordinal);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  // Makes it current on this thread until Leave puts back what was. Nests.
  void Enter() const;
  bool TryEnter() const noexcept;
  void Leave() const noexcept;

  // 32 hexadecimal digits, of this GPU, or of this part of one, and of no other anywhere.
  std::string Uuid() const;

 private:
  void Check(CUresult code, const char* call) const;

  CUresult (*init_)(unsigned) = nullptr;
  CUresult (*get_)(CUdevice*, int) = nullptr;
  CUresult (*retain_)(CUcontext*, CUdevice) = nullptr;
  CUresult (*release_)(CUdevice) = nullptr;
  CUresult (*push_)(CUcontext) = nullptr;
  CUresult (*pop_)(CUcontext*) = nullptr;
  CUresult (*uuid_)(CUuuid*, CUdevice) = nullptr;
  CUresult (*error_text_)(CUresult, const char**) = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

}  // namespace hvpipe
