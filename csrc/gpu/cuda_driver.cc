// Loads CUDA's driver and checks its version.
#include "gpu/cuda_driver.h"

#include <dlfcn.h>

#include "base/error.h"

namespace hvpipe {
namespace {

constexpr int kOldest = 11080;  // PTX 7.8, the version of kernels.ptx

template <typename Function>
void Find(void* driver, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(driver, name));
  if (function != nullptr) return;
  throw Error(
      "The CUDA driver should support CUDA 11.8 or later: update it. Received: libcuda.so.1 without " +
          std::string(name),
      ErrorKind::kUsage);
}

}  // namespace

const CudaDriver& CudaDriver::Get() {
  static const CudaDriver driver;
  return driver;
}

CudaDriver::CudaDriver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    const char* const why = dlerror();
    throw Error("No CUDA device can be used: there is no driver: " + std::string(why ? why : ""),
                ErrorKind::kUsage);
  }
#define HVPIPE_CUDA_FIND(name, symbol, ...) Find(driver, #symbol, name);
  HVPIPE_CUDA_FUNCTIONS(HVPIPE_CUDA_FIND)
#undef HVPIPE_CUDA_FIND
  int version = 0;
  Check(DriverGetVersion(&version), "cuDriverGetVersion");
  if (version < kOldest) {
    throw Error("The CUDA driver should support CUDA 11.8 or later: update it. Received: a driver for CUDA " +
                    Version(),
                ErrorKind::kUsage);
  }
  if (const int code = Init(0)) {
    throw Error("No CUDA device can be used: " + TextOf(code) + ". Received: a driver for CUDA " + Version(),
                ErrorKind::kUsage);
  }
}

std::string CudaDriver::Version() const {
  int version = 0;
  (void)DriverGetVersion(&version);
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string CudaDriver::TextOf(int code) const {
  const char* text = nullptr;
  (void)GetErrorString(code, &text);
  return text != nullptr ? text : "error " + std::to_string(code);
}

void CudaDriver::Check(int code, const char* call) const {
  if (code == cuda::kSuccess) return;
  throw Error("CUDA call failed: " + std::string(call) + ": " + TextOf(code), ErrorKind::kPeer);
}

}  // namespace hvpipe
