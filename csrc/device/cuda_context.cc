// Loads the driver's functions. hvpipe is not linked with the driver, because build machines may have none.
#include "device/cuda_context.h"

#include <dlfcn.h>

#include "core/error.h"

namespace hvpipe {
namespace {

template <typename Function>
void Find(void* driver, const char* name, Function& function) {
  function = driver == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(driver, name));
  if (function == nullptr) {
    throw Error("The CUDA driver should support CUDA 11.4 or later. Received: libcuda.so.1 without " +
                    std::string(name),
                ErrorKind::kUsage);
  }
}

}  // namespace

CudaContext::CudaContext(int ordinal) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  Find(driver, "cuGetErrorString", error_text_);
  Find(driver, "cuInit", init_);
  Find(driver, "cuDeviceGet", get_);
  Find(driver, "cuDevicePrimaryCtxRetain", retain_);
  Find(driver, "cuDevicePrimaryCtxRelease_v2", release_);
  Find(driver, "cuCtxPushCurrent_v2", push_);
  Find(driver, "cuCtxPopCurrent_v2", pop_);
  Find(driver, "cuDeviceGetUuid_v2", uuid_);
  Find(driver, "cuMemGetAddressRange_v2", range_);
  Check(init_(0), "cuInit");
  Check(get_(&device_, ordinal), "cuDeviceGet");
  Check(retain_(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaContext::~CudaContext() { (void)release_(device_); }

void CudaContext::Enter() const { Check(push_(context_), "cuCtxPushCurrent"); }

bool CudaContext::TryEnter() const noexcept { return push_(context_) == CUDA_SUCCESS; }

void CudaContext::Leave() const noexcept {
  CUcontext ours = nullptr;
  (void)pop_(&ours);
}

std::string CudaContext::Uuid() const {
  CUuuid uuid;
  Check(uuid_(&uuid, device_), "cuDeviceGetUuid");
  std::string text;
  for (const char byte : uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[(byte >> 4) & 15];
    text += kDigits[byte & 15];
  }
  return text;
}

std::size_t CudaContext::AllocatedBytes(const void* memory) const {
  CUdeviceptr first = 0;
  std::size_t bytes = 0;
  Check(range_(&first, &bytes, reinterpret_cast<CUdeviceptr>(memory)), "cuMemGetAddressRange");
  return bytes;
}

void CudaContext::Check(CUresult code, const char* call) const {
  if (code == CUDA_SUCCESS) return;
  const char* text = nullptr;
  (void)error_text_(code, &text);
  throw Error("CUDA call failed: " + std::string(call) + ": " + (text != nullptr ? text : "unknown error"),
              ErrorKind::kPeer);
}

}  // namespace hvpipe
