// Meets a real device and a real NCCL with one rank: streams and events, and every call of a communicator.
//
//   one_rank_driver DEVICE_LIBRARY [NCCL_LIBRARY]
//
// Prints a line for each part: "ok WHAT", or "FAILED WHAT: why". Exit code 1 if one failed.
// bench/gpu/check.py builds it.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "gpu/device.h"
#include "gpu/nccl.h"

namespace {

using hvpipe::Device;
using hvpipe::DType;

constexpr double kTimeoutS = 20;
constexpr std::size_t kCount = 1'000'003;
bool failed = false;

void Expect(bool right, const std::string& what) {
  if (!right) throw hvpipe::Error("wrong: " + what);
}

void Run(const char* what, const std::function<void()>& check) {
  try {
    check();
    std::printf("ok %s\n", what);
  } catch (const std::exception& error) {
    failed = true;
    std::printf("FAILED %s: %s\n", what, error.what());
  }
  std::fflush(stdout);
}

std::vector<float> Random(std::size_t count) {
  std::mt19937 numbers(std::random_device{}());
  std::uniform_real_distribution<float> uniform(-2, 2);
  std::vector<float> found(count);
  for (float& each : found) each = uniform(numbers);
  return found;
}

// Device memory with two streams and an event.
class Fixture {
 public:
  explicit Fixture(Device& device)
      : device_(device), stream_(device.MakeStream()), other_(device.MakeStream()) {}

  Device::Stream stream() const { return stream_; }

  void Synchronize(Device::Stream stream) {
    const Device::Event event = device_.MakeEvent();
    device_.Record(event, stream);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!device_.Reached(event))
      Expect(std::chrono::steady_clock::now() < end, "an event is never reached");
    device_.DestroyEvent(event);
  }

  void Put(void* to, const std::vector<float>& from) {
    device_.CopyFromHost(to, from.data(), from.size() * sizeof(float), stream_);
    Synchronize(stream_);
  }

  std::vector<float> Get(const void* from, std::size_t count) {
    std::vector<float> found(count);
    device_.CopyToHost(found.data(), from, count * sizeof(float), stream_);
    Synchronize(stream_);
    return found;
  }

  // A long chain of casts on one stream; a copy on the other waits for its end by an event.
  void StreamsAndEvents() {
    const std::size_t large = std::size_t{1} << 26;
    auto* const chain = static_cast<float*>(device_.Allocate(large * sizeof(float)));
    Expect(chain != nullptr, "no memory");
    const std::vector<float> ones(large, 1.0F);
    Put(chain, ones);
    for (int i = 0; i < 40; ++i) {
      device_.ScaleAndCast({{chain, chain, large}}, DType::kFloat32, DType::kFloat32, i < 20 ? 2.0 : 0.5,
                           stream_);
    }
    device_.ScaleAndCast({{chain, chain, large}}, DType::kFloat32, DType::kFloat32, 3.0, stream_);
    const Device::Event event = device_.MakeEvent();
    device_.Record(event, stream_);
    const bool early = device_.Reached(event);
    device_.Wait(other_, event);
    float last = 0;
    auto* const host = static_cast<float*>(device_.AllocateHost(sizeof(float)));
    device_.CopyToHost(host, chain + large - 1, sizeof(float), other_);
    Synchronize(other_);
    last = *host;
    Expect(device_.Reached(event), "the event is not reached though the stream that waited for it is");
    Expect(std::fabs(last - 3.0F) < 1e-6F,
           "a stream did not wait: " + std::to_string(last) + " in place of 3");
    Expect(!early, "40 passes over 256 MB ended before the call returned: calls are not asynchronous");
    device_.FreeHost(host);
    device_.DestroyEvent(event);
    device_.Free(chain);
  }

 private:
  Device& device_;
  Device::Stream stream_, other_;
};

void Check(const std::vector<float>& found, const std::vector<float>& wanted, const char* what) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (found[i] != wanted[i]) {
      throw hvpipe::Error("wrong: " + std::string(what) + " at " + std::to_string(i) + ": " +
                          std::to_string(found[i]) + " in place of " + std::to_string(wanted[i]));
    }
  }
}

// One rank's calls of a real NCCL.
class NcclChecks {
 public:
  NcclChecks(std::shared_ptr<Device> shared, Fixture& bench, const std::string& path)
      : shared_(std::move(shared)), device_(*shared_), bench_(bench), library_(path), current_(device_) {
    std::printf("note NCCL %s, %s\n", library_.VersionText().c_str(), path.c_str());
    bench_.Put(in_, numbers_);
  }

  ~NcclChecks() {
    device_.Free(in_);
    device_.Free(out_);
  }

  void RunAll() {
    Run("NCCL: join", [&] {
      one_ = std::make_unique<hvpipe::NcclCommunicator>(library_, shared_, 0, 1, library_.NewId());
      one_->WaitUntilReady(60, "joining", [] {});
    });
    if (one_ == nullptr) return;
    Collectives();
    Memory();
    Ends();
  }

 private:
  static constexpr std::size_t kBytes = kCount * sizeof(float);

  void Settle(const char* what) {
    one_->WaitUntilReady(kTimeoutS, what, [] {});
    bench_.Synchronize(bench_.stream());
  }

  void Collectives() {
    Run("NCCL: reduce-scatter, all-gather, broadcast in place", [&] {
      bench_.Put(out_, numbers_);
      one_->ReduceScatter(out_, kCount, DType::kFloat32, bench_.stream());
      Settle("a reduce-scatter");
      one_->AllGather(out_, kCount, DType::kFloat32, bench_.stream());
      Settle("an all-gather");
      one_->Broadcast(out_, kBytes, 0, bench_.stream());
      Settle("a broadcast");
      Check(bench_.Get(out_, kCount), numbers_, "the sum");
    });
    Run("NCCL: grouped send to itself", [&] {
      bench_.Put(out_, poison_);
      one_->Grouped([&] {
        one_->Send(in_, kBytes, 0, bench_.stream());
        one_->Receive(out_, kBytes, 0, bench_.stream());
      });
      Settle("a message to itself");
      Check(bench_.Get(out_, kCount), numbers_, "the message");
    });
    Run("NCCL: several all-reduces in a group", [&] {
      bench_.Put(out_, poison_);
      one_->Grouped([&] {
        const std::size_t half = kCount / 2;
        one_->AllReduce(in_, out_, half, DType::kFloat32, bench_.stream());
        one_->AllReduce(static_cast<float*>(in_) + half, static_cast<float*>(out_) + half, kCount - half,
                        DType::kFloat32, bench_.stream());
      });
      Settle("a group");
      Check(bench_.Get(out_, kCount), numbers_, "the sums");
    });
  }

  void Memory() {
    Run("NCCL: registered memory", [&] {
      Expect(library_.has_memory(), "this NCCL has no ncclMemAlloc");
      void* const own = library_.Allocate(kBytes);
      std::printf("note ncclMemAlloc takes memory in pieces of %zu bytes\n", device_.AllocatedBytes(own));
      device_.Clear(own, kBytes);
      Check(bench_.Get(own, kCount), std::vector<float>(kCount, 0.0F), "cleared memory");
      void* const registration = one_->Register(own, kBytes);
      std::printf("note ncclCommRegister %s\n", registration != nullptr ? "registers" : "is switched off");
      bench_.Put(own, numbers_);
      one_->AllReduce(own, own, kCount, DType::kFloat32, bench_.stream());
      Settle("an all-reduce of registered memory");
      Check(bench_.Get(own, kCount), numbers_, "the sum");
      if (registration != nullptr) one_->Deregister(registration);
      library_.Free(own);
    });
  }

  void Ends() {
    Run("NCCL: close", [&] { one_->Close(kTimeoutS); });
    Run("NCCL: abort, from a thread without a current device", [&] {
      hvpipe::NcclCommunicator ended(library_, shared_, 0, 1, library_.NewId());
      ended.WaitUntilReady(60, "joining", [] {});
      ended.AllReduce(in_, out_, kCount, DType::kFloat32, bench_.stream());
      std::thread([&] { ended.Abort(); }).join();
      Expect(ended.Aborted(kTimeoutS), "the abort does not end");
      bool refused = false;
      try {
        ended.AllReduce(in_, out_, 1, DType::kFloat32, bench_.stream());
      } catch (const hvpipe::Error&) {
        refused = true;
      }
      Expect(refused, "a call after the abort is not refused");
      bench_.Synchronize(bench_.stream());
    });
    Run("NCCL: a second communicator after an abort", [&] {
      hvpipe::NcclCommunicator again(library_, shared_, 0, 1, library_.NewId());
      again.WaitUntilReady(60, "joining", [] {});
      again.AllReduce(in_, out_, kCount, DType::kFloat32, bench_.stream());
      again.WaitUntilReady(kTimeoutS, "an all-reduce", [] {});
      bench_.Synchronize(bench_.stream());
      again.Close(kTimeoutS);
    });
  }

  const std::shared_ptr<Device> shared_;
  Device& device_;
  Fixture& bench_;
  const hvpipe::NcclLibrary library_;
  const hvpipe::CurrentDevice current_;
  const std::vector<float> numbers_ = Random(kCount);
  const std::vector<float> poison_ = std::vector<float>(kCount, NAN);
  void* const in_ = device_.Allocate(kBytes);
  void* const out_ = device_.Allocate(kBytes);
  std::unique_ptr<hvpipe::NcclCommunicator> one_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  try {
    const std::shared_ptr<Device> device = hvpipe::OpenDevice(argv[1], 0);
    std::printf("note device %s\n", device->Name().c_str());
    Fixture bench(*device);
    Run("streams and events", [&] { bench.StreamsAndEvents(); });
    if (argc > 2) Run("NCCL", [&] { NcclChecks(device, bench, argv[2]).RunAll(); });
  } catch (const std::exception& error) {
    std::printf("FAILED opening the device: %s\n", error.what());
    return 1;
  }
  return failed ? 1 : 0;
}
