// A device for tests without a GPU. Its memory is host memory, its threads run one after the other, and an event is
// reached only at the second look. It refuses calls in the wrong order.
#include <new>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "device/device.h"
#include "device/tiles.h"

namespace {

using hvpipe::Device;
using hvpipe::DType;
using hvpipe::Error;

template <int kCapacity>
void ScaleAndCastOnHost(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                unsigned* not_finite, unsigned* launches) {
  hvpipe::WithTypes(from, to, [&](auto source, auto target) {
    hvpipe::ForEachTable<kCapacity>(pieces, scale, not_finite, [&](const auto& table, unsigned tiles) {
      for (unsigned tile = 0; tile < tiles; ++tile) {
        for (unsigned thread = 0; thread < hvpipe::kTileThreads; ++thread) {
          hvpipe::CastTile<decltype(source), decltype(target)>(table, tile, thread, hvpipe::kTileThreads);
        }
      }
      if (launches != nullptr) ++*launches;
    });
  });
}

// Over all devices of this process: memory, streams and events that were not given back, and the number of host
// allocations.
std::atomic<int> held{0}, host_allocations{0};

// The devices that the calling thread has entered; the last one is current.
thread_local std::vector<int> entered;

struct FakeEvent {
  bool recorded = false;
  int looks = 0;
};

class FakeDevice : public Device {
 public:
  explicit FakeDevice(int ordinal) : ordinal_(ordinal) {}
  std::string Name() const override { return "test device " + std::to_string(ordinal_); }
  // FAKE_DEVICE_PARTS: all devices are parts of one board.
  Identity Identify() const override {
    return {Name(), std::getenv("FAKE_DEVICE_PARTS") != nullptr ? "the board" : Name()};
  }
  void Enter() override { entered.push_back(ordinal_); }
  void Leave() noexcept override { entered.pop_back(); }

  void CheckIsHere(const void*) override {
    if (std::getenv("FAKE_DEVICE_ELSEWHERE") == nullptr) return;
    throw Error("The array should lie on this test device", hvpipe::ErrorKind::kUsage);
  }
  // FAKE_DEVICE_FREE: its free bytes. FAKE_DEVICE_FULL: allocations fail, whatever FreeMemory says.
  MemorySize FreeMemory() override {
    const char* const free = std::getenv("FAKE_DEVICE_FREE");
    return {free != nullptr ? std::strtoull(free, nullptr, 10) : 1'000'000'000, 2'000'000'000};
  }
  // FAKE_DEVICE_UNIT: of all allocations.
  std::size_t AllocatedBytes(const void*) override {
    const char* const unit = std::getenv("FAKE_DEVICE_UNIT");
    return unit != nullptr ? std::strtoull(unit, nullptr, 10) : 2 << 20;
  }
  void* Allocate(std::size_t bytes) override {
    return std::getenv("FAKE_DEVICE_FULL") != nullptr ? nullptr : Held(std::calloc(bytes, 1));
  }
  void Free(void* memory) noexcept override { std::free(Returned(memory)); }
  void Clear(void* memory, std::size_t bytes) override { std::memset(memory, 0, bytes); }
  void* AllocateHost(std::size_t bytes) override {
    ++host_allocations;
    return Held(std::malloc(bytes));
  }
  void FreeHost(void* memory) noexcept override { std::free(Returned(memory)); }

  Stream MakeStream() override { return Held(new char); }
  void DestroyStream(Stream stream) noexcept override { delete static_cast<char*>(Returned(stream)); }
  Event MakeEvent() override { return Held(new FakeEvent); }
  void DestroyEvent(Event event) noexcept override { delete static_cast<FakeEvent*>(Returned(event)); }
  void Record(Event event, Stream) override { *static_cast<FakeEvent*>(event) = {true, 0}; }
  bool Reached(Event event) override {
    auto& of = *static_cast<FakeEvent*>(event);
    if (!of.recorded) throw Error("an event was asked for that was not recorded");
    return ++of.looks > 1 && std::getenv("FAKE_DEVICE_HANGS") == nullptr;
  }
  void Wait(Stream, Event event) override {
    if (!static_cast<FakeEvent*>(event)->recorded) throw Error("a stream waits for nothing");
  }

  void CopyToHost(void* host, const void* device, std::size_t bytes, Stream) override {
    std::memcpy(host, device, bytes);
  }
  void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream) override {
    std::memcpy(device, host, bytes);
  }
  void ScaleAndCast(const std::vector<Piece>& pieces, DType from, DType to, double scale, unsigned* not_finite,
            Stream) override {
    if (std::getenv("FAKE_DEVICE_FAILS") != nullptr) throw Error("a launch failed", hvpipe::ErrorKind::kPeer);
    if (std::getenv("FAKE_DEVICE_NO_HOST_MEMORY") != nullptr) throw std::bad_alloc();
    ScaleAndCastOnHost<hvpipe::kFewPieces>(pieces, from, to, scale, not_finite, nullptr);
  }

 private:
  static void* Held(void* given) {
    ++held;
    return given;
  }
  static void* Returned(void* taken) {
    --held;
    return taken;
  }

  const int ordinal_;
};

}  // namespace

extern "C" {

int hvpipe_count_devices() {
  const char* const devices = std::getenv("FAKE_DEVICES");
  return devices != nullptr ? std::atoi(devices) : 8;
}

// FAKE_DEVICE_BROKEN: why none can be opened.
Device* hvpipe_open_device(int ordinal, int version) {
  if (const char* const why = std::getenv("FAKE_DEVICE_BROKEN")) throw Error(why, hvpipe::ErrorKind::kUsage);
  if (version != hvpipe::kDeviceInterface) throw Error("another build", hvpipe::ErrorKind::kUsage);
  return new FakeDevice(ordinal);
}

int current_device() { return entered.empty() ? -1 : entered.back(); }
int things_held() { return held; }
int host_memory_allocations() { return host_allocations; }

// Runs the code of the kernel on the CPU. Returns the number of launches.
unsigned move_pieces(int count, const void* const* from, void* const* to, const std::size_t* counts,
                     int from_type, int to_type, double scale, unsigned* not_finite, int many) {
  std::vector<Device::Piece> pieces;
  for (int i = 0; i < count; ++i) pieces.push_back({from[i], to[i], counts[i]});
  unsigned launches = 0;
  const auto move = many != 0 ? ScaleAndCastOnHost<hvpipe::kManyPieces> : ScaleAndCastOnHost<hvpipe::kFewPieces>;
  move(pieces, static_cast<DType>(from_type), static_cast<DType>(to_type), scale, not_finite, &launches);
  return launches;
}
}
