// Loaded before hvpipe: what TensorFlow's kernels call in the engine has no memory left.
#include <new>
#include <thread>

#include "engine/gradient_buckets.h"
#include "gpu/device_messenger.h"
#include "named/named_calls.h"

namespace hvpipe {

void GradientBuckets::BeginStep(int, std::int64_t, double, bool, StepBegun) { throw std::bad_alloc(); }
void GradientBuckets::Submit(int, int, const std::vector<const void*>&, double) { throw std::bad_alloc(); }
// The first bucket fails at once, the second when its sum is complete.
void GradientBuckets::Collect(int, int bucket, Done done, bool) {
  if (bucket == 0) throw std::bad_alloc();
  std::thread([done = std::move(done)] { done(nullptr); }).detach();
}
std::shared_ptr<AlignedBuffer> GradientBuckets::Take(int, int) { throw std::bad_alloc(); }
void DeviceMessenger::SendPosted(std::int64_t, const void*, std::size_t, Device::Stream,
                                 std::shared_ptr<const void>) {
  throw std::bad_alloc();
}
void DeviceMessenger::TakePosted(std::int64_t, void*, std::size_t, DType, Device::Stream) {
  throw std::bad_alloc();
}
void named::NamedCalls::Submit(Call) { throw std::bad_alloc(); }

}  // namespace hvpipe
