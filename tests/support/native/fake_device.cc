// A device for tests without a GPU. Its memory is host memory, and its threads run one after the other.
//
// Each stream runs its work in order, as late as CUDA allows: only if a look at an event needs it, with what that work
// waits for, and nothing else. So if code forgets a wait, the work reads what is not written yet, or finds it written
// over, and the test sees wrong numbers. An event is reached only at the second look.
#include <new>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/tiles.h"
#include "cast_types.h"

namespace {

using hvpipe::Device;
using hvpipe::DType;
using hvpipe::Error;

void ScaleAndCastOnHost(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                unsigned* launches) {
  hvpipe::WithTypes(from, to, [&](auto source, auto target) {
    hvpipe::ForEachTable(pieces, scale, [&](const auto& table, unsigned tiles) {
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

// One call of Record. Done when its stream has run all work before it.
struct Recording {
  Device::Stream stream;
  bool done = false;
};

struct FakeEvent {
  std::shared_ptr<Recording> recording;  // the last one
  int looks = 0;
};

// Memory that work reads or writes.
struct Span {
  const void* begin;
  std::size_t bytes;
  bool Overlaps(const void* other, std::size_t other_bytes) const {
    const auto first = reinterpret_cast<std::uintptr_t>(begin), second = reinterpret_cast<std::uintptr_t>(other);
    return first < second + other_bytes && second < first + bytes;
  }
};

// What was handed to a stream. `run` returns false if it has not finished; it is then called again.
struct Work {
  std::function<bool()> run;
  std::vector<Span> uses;
};

// The streams of this process. Any thread may call.
class Streams {
 public:
  void Add(Device::Stream stream, std::function<bool()> run, std::vector<Span> uses) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queues_[stream].push_back(std::make_shared<Work>(Work{std::move(run), std::move(uses)}));
  }
  std::shared_ptr<Recording> Record(Device::Stream stream) {
    auto recording = std::make_shared<Recording>(Recording{stream});
    Add(stream, [recording] { return recording->done = true; }, {});
    return recording;
  }
  void Wait(Device::Stream stream, std::shared_ptr<Recording> recording) {
    Add(stream, [this, recording] { return RunUntil(*recording); }, {});
  }
  // Runs what `recording` needs, as far as possible now. Returns whether it is done.
  bool Look(const Recording& recording) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return RunUntil(recording);
  }
  bool Uses(const void* memory, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [stream, queue] : queues_) {
      for (const auto& work : queue) {
        for (const Span& span : work->uses) {
          if (span.Overlaps(memory, bytes)) return true;
        }
      }
    }
    return false;
  }
  // Runs all work of one stream, or of all of them. Returns whether it finished in time.
  bool Finish(Device::Stream stream, double limit_s) { return Repeat(limit_s, [=] { return RunAll(stream); }); }
  bool FinishEverything(double limit_s) {
    return Repeat(limit_s, [this] {
      bool finished = true;
      for (const auto& [stream, queue] : queues_) finished = RunAll(stream) && finished;
      return finished;
    });
  }

 private:
  // With mutex_ held. Waits refer to earlier work only, so this ends.
  bool RunUntil(const Recording& recording) {
    while (!recording.done) {
      if (!RunOne(recording.stream)) return false;
    }
    return true;
  }
  bool RunAll(Device::Stream stream) {
    while (!queues_[stream].empty()) {
      if (!RunOne(stream)) return false;
    }
    return true;
  }
  bool RunOne(Device::Stream stream) {
    auto& queue = queues_[stream];
    const std::shared_ptr<Work> work = queue.front();
    if (!work->run()) return false;
    queue.pop_front();
    return true;
  }
  bool Repeat(double limit_s, const std::function<bool()>& run) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
    for (;;) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (run()) return true;
      }
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::mutex mutex_;
  std::map<Device::Stream, std::deque<std::shared_ptr<Work>>> queues_;  // also of streams that were destroyed
};

Streams& TheStreams() {
  static Streams* const streams = new Streams;  // never destroyed: other libraries' threads may end later
  return *streams;
}

std::mutex sizes_mutex;
std::map<const void*, std::size_t> sizes;  // of allocations

void* Allocated(void* memory, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(sizes_mutex);
  sizes[memory] = bytes;
  return memory;
}

// CUDA waits for the device before it frees memory.
void FreeAfterUse(void* memory) {
  std::size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(sizes_mutex);
    bytes = sizes[memory];
    sizes.erase(memory);
  }
  if (TheStreams().Uses(memory, bytes) && !TheStreams().FinishEverything(1.0) && TheStreams().Uses(memory, bytes)) {
    std::fputs("memory was freed that work on the test device waits to use\n", stderr);
    std::abort();
  }
  std::free(memory);
}

// An address that no other stream ever had.
Device::Stream NewStream() {
  static std::atomic<std::uintptr_t> last{0x1000};
  return reinterpret_cast<Device::Stream>(++last);
}

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
    return std::getenv("FAKE_DEVICE_FULL") != nullptr ? nullptr : Held(Allocated(std::calloc(bytes, 1), bytes));
  }
  void Free(void* memory) noexcept override { FreeAfterUse(Returned(memory)); }
  void Clear(void* memory, std::size_t bytes) override { std::memset(memory, 0, bytes); }
  void* AllocateHost(std::size_t bytes) override {
    ++host_allocations;
    return Held(Allocated(std::malloc(bytes), bytes));
  }
  void FreeHost(void* memory) noexcept override { FreeAfterUse(Returned(memory)); }

  Stream MakeStream() override { return Held(NewStream()); }
  void DestroyStream(Stream stream) noexcept override { (void)Returned(stream); }
  Event MakeEvent() override { return Held(new FakeEvent); }
  void DestroyEvent(Event event) noexcept override { delete static_cast<FakeEvent*>(Returned(event)); }
  void Record(Event event, Stream stream) override {
    *static_cast<FakeEvent*>(event) = {TheStreams().Record(stream), 0};
  }
  bool Reached(Event event) override {
    auto& of = *static_cast<FakeEvent*>(event);
    if (!of.recording) throw Error("an event was asked for that was not recorded");
    if (std::getenv("FAKE_DEVICE_HANGS") != nullptr) return false;
    return ++of.looks > 1 && TheStreams().Look(*of.recording);
  }
  void Wait(Stream stream, Event event) override {
    const auto& recording = static_cast<FakeEvent*>(event)->recording;
    if (!recording) throw Error("a stream waits for nothing");
    TheStreams().Wait(stream, recording);
  }

  void CopyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    Copy(host, device, bytes, stream);
  }
  void CopyFromHost(void* device, const void* host, std::size_t bytes, Stream stream) override {
    Copy(device, host, bytes, stream);
  }
  void ScaleAndCast(const std::vector<Piece>& pieces, DType from, DType to, double scale,
                    Stream stream) override {
    if (std::getenv("FAKE_DEVICE_FAILS") != nullptr) throw Error("a launch failed", hvpipe::ErrorKind::kPeer);
    if (std::getenv("FAKE_DEVICE_NO_HOST_MEMORY") != nullptr) throw std::bad_alloc();
    std::vector<Span> uses;
    for (const Piece& piece : pieces) {
      uses.push_back({piece.from, piece.count * hvpipe::SizeOf(from)});
      uses.push_back({piece.to, piece.count * hvpipe::SizeOf(to)});
    }
    const auto run = [=] {
      ScaleAndCastOnHost(pieces, from, to, scale, nullptr);
      return true;
    };
    TheStreams().Add(stream, run, std::move(uses));
  }

 private:
  static void Copy(void* to, const void* from, std::size_t bytes, Stream stream) {
    const auto run = [=] {
      std::memcpy(to, from, bytes);
      return true;
    };
    TheStreams().Add(stream, run, {{to, bytes}, {from, bytes}});
  }
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

// Enqueues work of fake_nccl.cc that uses `bytes` of memory. `run` is called until it returns 1.
void fake_device_enqueue(void* stream, int (*run)(void*), void* context, const void* memory, std::size_t bytes) {
  TheStreams().Add(stream, [=] { return run(context) != 0; }, {{memory, bytes}});
}
int fake_device_uses(const void* memory, std::size_t bytes) { return TheStreams().Uses(memory, bytes); }
// Runs all work of a stream, like a read of an array on it. Returns 0 if that takes longer.
int fake_device_finish(void* stream, double limit_s) { return TheStreams().Finish(stream, limit_s); }

int current_device() { return entered.empty() ? -1 : entered.back(); }
int things_held() { return held; }
int host_memory_allocations() { return host_allocations; }

// Runs the code of the kernel on the CPU. Returns the number of launches.
unsigned move_pieces(int count, const void* const* from, void* const* to, const std::size_t* counts,
                     int from_type, int to_type, double scale) {
  std::vector<Device::Piece> pieces;
  for (int i = 0; i < count; ++i) pieces.push_back({from[i], to[i], counts[i]});
  unsigned launches = 0;
  ScaleAndCastOnHost(pieces, static_cast<DType>(from_type), static_cast<DType>(to_type), scale, &launches);
  return launches;
}
}
