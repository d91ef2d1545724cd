// A CUDA device behind the engine's interface; the only file beside the kernels that includes CUDA.
#include <cuda_runtime_api.h>

#include <string>

#include "device.h"
#include "error.h"
#include "kernels.h"

namespace hvpipe {
namespace {

void CheckCuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next call would be told of it again
  throw Error("CUDA call failed: " + std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                  cudaGetErrorName(code) + ")",
              ErrorKind::kPeer);
}

#define HVPIPE_CUDA(call) CheckCuda((call), #call)

// The calling thread may have another device current, and keeps it.
class Current {
 public:
  explicit Current(int ordinal) {
    HVPIPE_CUDA(cudaGetDevice(&before_));
    if (before_ != ordinal) HVPIPE_CUDA(cudaSetDevice(ordinal));
    changed_ = before_ != ordinal;
  }
  ~Current() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

std::string Megabytes(std::size_t bytes) { return std::to_string((bytes + 999'999) / 1'000'000) + " MB"; }

std::string Version(int code) { return std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10); }

int Count() {
  int devices = 0, driver = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code == cudaSuccess) return devices;
  (void)cudaGetLastError();
  (void)cudaDriverGetVersion(&driver);
  throw Error("A CUDA device should be usable: " + std::string(cudaGetErrorString(code)) +
                  ". Received: " + (driver == 0 ? "no driver" : "a driver for CUDA " + Version(driver)) +
                  "; hvpipe was built with CUDA " + Version(CUDART_VERSION),
              ErrorKind::kUsage);
}

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal) {
    const int devices = Count();
    if (ordinal >= 0 && ordinal < devices) return;
    throw Error(
        "The device should be one of the " + std::to_string(devices) +
            " that this process sees (CUDA_VISIBLE_DEVICES). Received: device=" + std::to_string(ordinal),
        ErrorKind::kUsage);
  }

  std::string Name() const override {
    cudaDeviceProp properties;
    HVPIPE_CUDA(cudaGetDeviceProperties(&properties, ordinal_));
    char bus[32] = {};
    HVPIPE_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal_));
    return std::string(properties.name) + " " + bus;
  }

  int Enter() override {
    int before = 0;
    HVPIPE_CUDA(cudaGetDevice(&before));
    HVPIPE_CUDA(cudaSetDevice(ordinal_));
    return before;
  }
  void Leave(int before) noexcept override { (void)cudaSetDevice(before); }

  void* Allocate(std::size_t bytes) override {
    const Current current(ordinal_);
    void* memory = nullptr;
    const cudaError_t code = cudaMalloc(&memory, bytes);
    if (code == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      std::size_t free = 0, total = 0;
      HVPIPE_CUDA(cudaMemGetInfo(&free, &total));
      throw Error("The GPU has no room for a gradient buffer: wanted " + Megabytes(bytes) + ", free are " +
                      Megabytes(free) + " of " + Megabytes(total) +
                      ". Leave it more (TensorFlow: memory growth or a memory limit) or use smaller buckets "
                      "(HVPIPE_BUCKET_BYTES below " +
                      std::to_string(free) + ")",
                  ErrorKind::kUsage);
    }
    CheckCuda(code, "cudaMalloc");
    try {
      Clear(memory, bytes);
    } catch (...) {
      Free(memory);
      throw;
    }
    return memory;
  }
  void Free(void* memory) noexcept override { (void)cudaFree(memory); }
  // Streams that do not wait for the default one could fill it before it is cleared.
  void Clear(void* memory, std::size_t bytes) override {
    const Current current(ordinal_);
    HVPIPE_CUDA(cudaMemsetAsync(memory, 0, bytes, cudaStreamLegacy));
    HVPIPE_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
  }

  void* AllocateHost(std::size_t bytes) override {
    const Current current(ordinal_);
    void* memory = nullptr;
    HVPIPE_CUDA(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
    return memory;
  }
  void FreeHost(void* memory) noexcept override { (void)cudaFreeHost(memory); }

  Stream MakeStream() override {
    const Current current(ordinal_);
    int lowest = 0, highest = 0;
    HVPIPE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    HVPIPE_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return stream;
  }
  void DestroyStream(Stream stream) noexcept override { (void)cudaStreamDestroy(Of(stream)); }

  Event MakeEvent() override {
    const Current current(ordinal_);
    cudaEvent_t event = nullptr;
    HVPIPE_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void DestroyEvent(Event event) noexcept override {
    (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }

  void Record(Event event, Stream stream) override {
    const Current current(ordinal_);
    HVPIPE_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), Of(stream)));
  }
  bool Reached(Event event) override {
    const cudaError_t code = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    CheckCuda(code, "cudaEventQuery");
    return true;
  }
  void Wait(Stream stream, Event event) override {
    const Current current(ordinal_);
    HVPIPE_CUDA(cudaStreamWaitEvent(Of(stream), static_cast<cudaEvent_t>(event), 0));
  }

  void CopyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    const Current current(ordinal_);
    HVPIPE_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, Of(stream)));
  }
  void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream stream) override {
    const Current current(ordinal_);
    HVPIPE_CUDA(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, Of(stream)));
  }
  void Move(const std::vector<Piece>& pieces, DType from, DType to, double scale, unsigned* not_finite,
            Stream stream) override {
    const Current current(ordinal_);
    CheckCuda(LaunchMove(pieces, from, to, scale, not_finite, Of(stream)), "the launch of a pack or unpack");
  }

 private:
  static cudaStream_t Of(Stream stream) { return static_cast<cudaStream_t>(stream); }

  const int ordinal_;
};

}  // namespace
}  // namespace hvpipe

extern "C" {

int hvpipe_count_devices() { return hvpipe::Count(); }

hvpipe::Device* hvpipe_open_device(int ordinal, int version) {
  if (version != hvpipe::kDeviceInterface) {
    throw hvpipe::Error("hvpipe's CUDA library is of another build; install hvpipe again",
                        hvpipe::ErrorKind::kUsage);
  }
  return new hvpipe::CudaDevice(ordinal);
}
}
