// Device on CUDA's runtime.
#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"
#include "device/cuda_context.h"
#include "device/device.h"
#include "device/kernels.h"

namespace hvpipe {
namespace {

void CheckCuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // otherwise the next call would report it again
  throw Error("CUDA call failed: " + std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                  cudaGetErrorName(code) + ")",
              ErrorKind::kPeer);
}

#define HVPIPE_CUDA(call) CheckCuda((call), #call)

std::string Version(int code) { return std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10); }

int Count() {
  int devices = 0, driver = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code == cudaSuccess) return devices;
  (void)cudaGetLastError();
  (void)cudaDriverGetVersion(&driver);
  throw Error(
      "A CUDA device should be usable: " + std::string(cudaGetErrorString(code)) +
          ". Received: " + (driver == 0 ? "no driver" : "a driver for CUDA " + Version(driver)) +
          "; hvpipe was built with CUDA " + Version(CUDART_VERSION) +
          ", and a build runs with drivers for that CUDA or a later one: update the driver, or install "
          "hvpipe again with an older nvcc first on PATH",
      ErrorKind::kUsage);
}

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal), context_(ordinal) {
    cudaDeviceProp properties;
    HVPIPE_CUDA(cudaGetDeviceProperties(&properties, ordinal_));
    char bus[32] = {};
    HVPIPE_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal_));
    name_ = properties.name;
    identity_ = {context_.Uuid(), bus};
    CheckKernels(properties);
  }

  // Read at the start, because a lost GPU no longer answers.
  std::string Name() const override { return name_ + " " + identity_.board; }
  Identity Identify() const override { return identity_; }

  void Enter() override { context_.Enter(); }
  void Leave() noexcept override { context_.Leave(); }

  void CheckIsHere(const void* memory) override {
    const CurrentDevice current(*this);
    cudaPointerAttributes found;
    HVPIPE_CUDA(cudaPointerGetAttributes(&found, memory));
    if (found.type == cudaMemoryTypeManaged) return;
    const bool on_a_gpu = found.type == cudaMemoryTypeDevice;
    if (on_a_gpu && found.device == ordinal_) return;
    throw Error("The array should lie on GPU " + std::to_string(ordinal_) +
                    ", the device of this rank among those that the process sees. Choose it before you make "
                    "arrays, for "
                    "example by torch.cuda.set_device(hvpipe.local_rank()). Received: an array " +
                    (on_a_gpu ? "on GPU " + std::to_string(found.device) : "in host memory"),
                ErrorKind::kUsage);
  }

  MemorySize FreeMemory() override {
    const CurrentDevice current(*this);
    MemorySize memory{};
    HVPIPE_CUDA(cudaMemGetInfo(&memory.free, &memory.total));
    return memory;
  }
  std::size_t AllocatedBytes(const void* memory) override {
    const CurrentDevice current(*this);
    return context_.AllocatedBytes(memory);
  }
  void* Allocate(std::size_t bytes) override {
    const CurrentDevice current(*this);
    void* memory = nullptr;
    const cudaError_t code = cudaMalloc(&memory, bytes);
    if (code == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
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
  void Free(void* memory) noexcept override {
    GiveBack([=] { return cudaFree(memory); });
  }
  // Waits, because streams that are not ordered with the default one could write before the memory is
  // cleared.
  void Clear(void* memory, std::size_t bytes) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(cudaMemsetAsync(memory, 0, bytes, cudaStreamLegacy));
    HVPIPE_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
  }

  void* AllocateHost(std::size_t bytes) override {
    const CurrentDevice current(*this);
    void* memory = nullptr;
    const cudaError_t code = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    if (code == cudaSuccess) return memory;
    (void)cudaGetLastError();
    throw Error("The host should have page-locked memory for data between the GPU and MPI: wanted " +
                    std::to_string(bytes) +
                    " more bytes (raise the limit: ulimit -l, docker run --ulimit memlock=-1). Received: " +
                    cudaGetErrorString(code),
                ErrorKind::kUsage);
  }
  void FreeHost(void* memory) noexcept override {
    GiveBack([=] { return cudaFreeHost(memory); });
  }

  Stream MakeStream() override {
    const CurrentDevice current(*this);
    int lowest = 0, highest = 0;
    HVPIPE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    HVPIPE_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return stream;
  }
  void DestroyStream(Stream stream) noexcept override {
    GiveBack([=] { return cudaStreamDestroy(Of(stream)); });
  }

  Event MakeEvent() override {
    const CurrentDevice current(*this);
    cudaEvent_t event = nullptr;
    HVPIPE_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void DestroyEvent(Event event) noexcept override {
    GiveBack([=] { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); });
  }

  void Record(Event event, Stream stream) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), Of(stream)));
  }
  bool Reached(Event event) override {
    const CurrentDevice current(*this);
    const cudaError_t code = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    CheckCuda(code, "cudaEventQuery");
    return true;
  }
  void Wait(Stream stream, Event event) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(cudaStreamWaitEvent(Of(stream), static_cast<cudaEvent_t>(event), 0));
  }

  void CopyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, Of(stream)));
  }
  void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream stream) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, Of(stream)));
  }
  void ScaleAndCast(const std::vector<Piece>& pieces, DType from, DType to, double scale,
                    Stream stream) override {
    const CurrentDevice current(*this);
    CheckCuda(LaunchScaleAndCast(pieces, from, to, scale, Of(stream)), "the launch of a pack or unpack");
  }

 private:
  static cudaStream_t Of(Stream stream) { return static_cast<cudaStream_t>(stream); }

  // Enters the context, because without one the runtime would make one on device 0. Clears the error, because
  // the next call must not report it.
  template <typename Call>
  void GiveBack(const Call& call) noexcept {
    if (!context_.TryEnter()) return;
    (void)call();
    (void)cudaGetLastError();
    context_.Leave();
  }

  // Checked here, because at the first pack the other ranks would already wait for this one.
  void CheckKernels(const cudaDeviceProp& properties) {
    const CurrentDevice current(*this);
    const cudaError_t code = LoadKernels();
    if (code == cudaSuccess) return;
    (void)cudaGetLastError();
    const std::string major = std::to_string(properties.major), minor = std::to_string(properties.minor);
    throw Error(
        "hvpipe should be built for the GPU that it runs on: install it again with "
        "CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=" +
            major + minor + ", using a CUDA version that supports it. Received: " + Name() +
            " of compute capability " + major + "." + minor + ": " + cudaGetErrorString(code),
        ErrorKind::kUsage);
  }

  const int ordinal_;
  const CudaContext context_;
  std::string name_;
  Identity identity_;
};

}  // namespace
}  // namespace hvpipe

extern "C" {

int hvpipe_count_devices() { return hvpipe::Count(); }

hvpipe::Device* hvpipe_open_device(int ordinal, int version) {
  if (version != hvpipe::kDeviceInterface) {
    throw hvpipe::Error("hvpipe's CUDA library is from another build; install hvpipe again",
                        hvpipe::ErrorKind::kUsage);
  }
  const int devices = hvpipe::Count();
  if (ordinal < 0 || ordinal >= devices) {
    throw hvpipe::Error(
        "The device should be one of the " + std::to_string(devices) +
            " that this process sees (CUDA_VISIBLE_DEVICES). Received: device=" + std::to_string(ordinal),
        hvpipe::ErrorKind::kUsage);
  }
  return new hvpipe::CudaDevice(ordinal);
}
}
