// Device on CUDA's driver.
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "gpu/cuda_driver.h"
#include "gpu/device.h"
#include "gpu/kernels.h"
#include "gpu/tiles.h"

namespace hvpipe {
namespace {

#define HVPIPE_CUDA(name, ...) driver_.Check(driver_.name(__VA_ARGS__), "cu" #name)

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

int Count() {
  const CudaDriver& driver = CudaDriver::Get();
  int devices = 0;
  driver.Check(driver.DeviceGetCount(&devices), "cuDeviceGetCount");
  return devices;
}

// It holds the primary context of its device, which CUDA's runtime and all frameworks use.
//
// Each call makes it current with the driver's calls, which can restore "no context". CUDA's runtime cannot:
// it reports device 0 for a thread that never chose a device, and restoring that would make a context there
// (some 0.5 GB).
class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : driver_(CudaDriver::Get()), ordinal_(ordinal) {
    HVPIPE_CUDA(DeviceGet, &device_, ordinal);
    char name[128] = {}, bus[32] = {};
    HVPIPE_CUDA(DeviceGetName, name, sizeof name, device_);
    HVPIPE_CUDA(DeviceGetPCIBusId, bus, sizeof bus, device_);
    name_ = name;
    identity_ = {Uuid(), bus};
    HVPIPE_CUDA(DevicePrimaryCtxRetain, &context_, device_);
    try {
      LoadKernels();
    } catch (...) {
      Close();
      throw;
    }
  }
  ~CudaDevice() override { Close(); }

  // Read at the start, because a lost GPU no longer answers.
  std::string Name() const override { return name_ + " " + identity_.board; }
  Identity Identify() const override { return identity_; }

  void Enter() override { HVPIPE_CUDA(CtxPushCurrent, context_); }
  void Leave() noexcept override {
    void* ours = nullptr;
    (void)driver_.CtxPopCurrent(&ours);
  }

  void CheckIsHere(const void* memory) override {
    const CurrentDevice current(*this);
    unsigned type = 0, managed = 0;  // what ordinary host memory leaves
    int owner = -1;
    int wanted[] = {cuda::kTypeOfPointer, cuda::kIsManaged, cuda::kDeviceOfPointer};
    void* found[] = {&type, &managed, &owner};
    HVPIPE_CUDA(PointerGetAttributes, 3, wanted, found, At(memory));
    if (managed != 0) return;
    const bool on_a_gpu = type == cuda::kDeviceMemory;
    if (on_a_gpu && owner == ordinal_) return;
    throw Error("The array should lie on GPU " + std::to_string(ordinal_) +
                    ", the device of this rank among those that the process sees. Choose it before you make "
                    "arrays, for "
                    "example by torch.cuda.set_device(hvpipe.local_rank()). Received: an array " +
                    (on_a_gpu ? "on GPU " + std::to_string(owner) : "in host memory"),
                ErrorKind::kUsage);
  }

  MemorySize FreeMemory() override {
    const CurrentDevice current(*this);
    MemorySize memory{};
    HVPIPE_CUDA(MemGetInfo, &memory.free, &memory.total);
    return memory;
  }
  std::size_t AllocatedBytes(const void* memory) override {
    const CurrentDevice current(*this);
    cuda::Address first = 0;
    std::size_t bytes = 0;
    HVPIPE_CUDA(MemGetAddressRange, &first, &bytes, At(memory));
    return bytes;
  }
  void* Allocate(std::size_t bytes) override {
    const CurrentDevice current(*this);
    cuda::Address address = 0;
    const int code = driver_.MemAlloc(&address, bytes);
    if (code == cuda::kOutOfMemory) return nullptr;
    driver_.Check(code, "cuMemAlloc");
    void* const memory = reinterpret_cast<void*>(address);
    try {
      Clear(memory, bytes);
    } catch (...) {
      Free(memory);
      throw;
    }
    return memory;
  }
  void Free(void* memory) noexcept override {
    GiveBack([&] { return driver_.MemFree(At(memory)); });
  }
  // Waits, because streams that are not ordered with the default one could write before the memory is
  // cleared.
  void Clear(void* memory, std::size_t bytes) override {
    const CurrentDevice current(*this);
    if (bytes == 0) return;
    HVPIPE_CUDA(MemsetD8Async, At(memory), 0, bytes, cuda::LegacyStream());
    HVPIPE_CUDA(StreamSynchronize, cuda::LegacyStream());
  }

  void* AllocateHost(std::size_t bytes) override {
    const CurrentDevice current(*this);
    void* memory = nullptr;
    const int code = driver_.MemHostAlloc(&memory, bytes, cuda::kPortableHostMemory);
    if (code == cuda::kSuccess) return memory;
    throw Error("Out of page-locked host memory for data between the GPU and MPI: wanted " +
                    std::to_string(bytes) +
                    " more bytes (raise the limit: ulimit -l, docker run --ulimit memlock=-1). Received: " +
                    driver_.TextOf(code),
                ErrorKind::kUsage);
  }
  void FreeHost(void* memory) noexcept override {
    GiveBack([&] { return driver_.MemFreeHost(memory); });
  }

  Stream MakeStream() override {
    const CurrentDevice current(*this);
    int lowest = 0, highest = 0;
    HVPIPE_CUDA(CtxGetStreamPriorityRange, &lowest, &highest);
    Stream stream = nullptr;
    HVPIPE_CUDA(StreamCreateWithPriority, &stream, cuda::kNonBlockingStream, highest);
    return stream;
  }
  void DestroyStream(Stream stream) noexcept override {
    GiveBack([&] { return driver_.StreamDestroy(stream); });
  }

  Event MakeEvent() override {
    const CurrentDevice current(*this);
    Event event = nullptr;
    HVPIPE_CUDA(EventCreate, &event, cuda::kEventWithoutTiming);
    return event;
  }
  void DestroyEvent(Event event) noexcept override {
    GiveBack([&] { return driver_.EventDestroy(event); });
  }

  void Record(Event event, Stream stream) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(EventRecord, event, stream);
  }
  bool Reached(Event event) override {
    const CurrentDevice current(*this);
    const int code = driver_.EventQuery(event);
    if (code == cuda::kNotReady) return false;
    driver_.Check(code, "cuEventQuery");
    return true;
  }
  void Wait(Stream stream, Event event) override {
    const CurrentDevice current(*this);
    HVPIPE_CUDA(StreamWaitEvent, stream, event, 0);
  }

  void CopyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    if (bytes == 0) return;  // for which the driver promises nothing
    const CurrentDevice current(*this);
    HVPIPE_CUDA(MemcpyDtoHAsync, host, At(device), bytes, stream);
  }
  void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    const CurrentDevice current(*this);
    HVPIPE_CUDA(MemcpyHtoDAsync, At(device), host, bytes, stream);
  }
  void ScaleAndCast(const std::vector<Piece>& pieces, DType from, DType to, double scale,
                    Stream stream) override {
    const CurrentDevice current(*this);
    const auto kernel = kernels_.find({from, to});
    if (kernel == kernels_.end()) {
      throw Error("internal: no cast from " + std::string(NameOf(from)) + " to " + NameOf(to));
    }
    ForEachTable(pieces, scale, [&](TileTable& table, unsigned tiles) {
      void* arguments[] = {&table};
      HVPIPE_CUDA(LaunchKernel, kernel->second, tiles, 1, 1, kTileThreads, 1, 1, 0, stream, arguments,
                  nullptr);
    });
  }

 private:
  static cuda::Address At(const void* memory) { return reinterpret_cast<cuda::Address>(memory); }

  // 32 hexadecimal digits, unique to this GPU or this part of a GPU.
  std::string Uuid() const {
    cuda::Uuid uuid;
    HVPIPE_CUDA(DeviceGetUuid, &uuid, device_);
    std::string text;
    for (const char byte : uuid.bytes) {
      constexpr const char* kDigits = "0123456789abcdef";
      text += kDigits[(byte >> 4) & 15];
      text += kDigits[byte & 15];
    }
    return text;
  }

  // Errors are ignored: a lost GPU has nothing to give back.
  template <typename Call>
  void GiveBack(const Call& call) noexcept {
    if (driver_.CtxPushCurrent(context_) != cuda::kSuccess) return;
    (void)call();
    Leave();
  }

  // The driver compiles them for this GPU, or takes them from its cache. It loads a kernel when it is asked
  // for: all of them here, because at the first pack the other ranks would already wait for this one.
  void LoadKernels() {
    const CurrentDevice current(*this);
    int code = driver_.ModuleLoadData(&module_, kKernels);
    if (code == cuda::kOutOfMemory) driver_.Check(code, "cuModuleLoadData");
    for (const DType from : kDTypes) {
      for (const DType to : kDTypes) {
        if ((from == DType::kFloat64) != (to == DType::kFloat64)) continue;
        const std::string name = "hvpipe_cast_" + std::string(NameOf(from)) + "_" + NameOf(to);
        if (code == cuda::kSuccess)
          code = driver_.ModuleGetFunction(&kernels_[{from, to}], module_, name.c_str());
      }
    }
    if (code == cuda::kSuccess) return;
    int major = 0, minor = 0;
    HVPIPE_CUDA(DeviceGetAttribute, &major, cuda::kMajorOfDevice, device_);
    HVPIPE_CUDA(DeviceGetAttribute, &minor, cuda::kMinorOfDevice, device_);
    throw Error(
        "The GPU should have compute capability 7.0 (V100) or later, and its driver should be able to "
        "compile hvpipe's kernels for it. Received: " +
            Name() + " of compute capability " + std::to_string(major) + "." + std::to_string(minor) +
            ", a driver for CUDA " + driver_.Version() + ": " + driver_.TextOf(code),
        ErrorKind::kUsage);
  }

  void Close() noexcept {
    GiveBack([&] { return module_ != nullptr ? driver_.ModuleUnload(module_) : cuda::kSuccess; });
    (void)driver_.DevicePrimaryCtxRelease(device_);
  }

  const CudaDriver& driver_;
  const int ordinal_;
  int device_ = 0;
  void* context_ = nullptr;
  void* module_ = nullptr;
  std::map<std::pair<DType, DType>, void*> kernels_;  // by the types that they cast from and to
  std::string name_;
  Identity identity_;
};

}  // namespace
}  // namespace hvpipe

extern "C" {

int hvpipe_count_devices() { return hvpipe::Count(); }

hvpipe::Device* hvpipe_open_device(int ordinal, int version) {
  if (version != hvpipe::kDeviceInterface) {
    throw hvpipe::Error("hvpipe's GPU library is from another build; install hvpipe again",
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
