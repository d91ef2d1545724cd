// Submit: the gradients of a bucket are packed into its fused buffer, and its all-reduce may start.
#include <atomic>
#include <utility>

#include "base/vector_loops.h"
#include "engine/gradient_buckets.h"

namespace hvpipe {

// Take the announced operation of an idle bucket.
std::shared_ptr<Operation> GradientBuckets::BeginReducing(Bucket& bucket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bucket.state != BucketState::kIdle || !bucket.announced) {
    throw Error("A bucket was submitted that " +
                    std::string(bucket.announced ? "still holds the previous step" : "no step announced") +
                    ". Received: bucket=" + bucket.layout.name,
                ErrorKind::kUsage);
  }
  bucket.state = BucketState::kReducing;
  bucket.packed = bucket.buffers;
  return std::exchange(bucket.announced, nullptr);
}

void GradientBuckets::Submit(int plan, int bucket_number, const std::vector<const void*>& tensors,
                             double scale) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  CheckIsOnHost(bucket);
  SubmitPacked(bucket, [&] { bucket.Pack(tensors, scale); });
}

void GradientBuckets::SubmitRows(int plan, int bucket_number, const std::int64_t* rows, std::size_t count,
                                 const void* values, double scale) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  TableRows& table = TableOf(bucket);
  SubmitPacked(bucket, [&] { table.PackSlices(rows, count, values, bucket.layout.tensor_type, scale); });
}

void GradientBuckets::SubmitPacked(Bucket& bucket, const std::function<void()>& pack) {
  const std::shared_ptr<Operation> operation = BeginReducing(bucket);
  EventLog& log = telemetry_.log;
  const double start = log.enabled() ? Now() : 0;
  try {
    pack();
  } catch (const std::exception& failure) {
    const Error error = ErrorOf(failure);
    progress_.Fail(error);  // the other ranks wait for a bucket that will not come
    throw error;
  }
  if (log.enabled()) log.Add("pack", bucket.layout.name, start, Now());
  telemetry_.flight.Add(Flight::kPacked, bucket.layout.name, operation->sequence());
  progress_.MakeReady(operation);
  if (const auto error = progress_.error()) throw *error;
}

void GradientBuckets::Bucket::Pack(const std::vector<const void*>& tensors, double scale) {
  if (table) return table->Pack(tensors.front(), layout.tensor_type, scale);
  if (host.use_count() > 1) {
    MakeHostBuffer();
  } else {
    // Pairs with the release by the thread that gave the buffer back.
    std::atomic_thread_fence(std::memory_order_acquire);
  }
  char* fused = static_cast<char*>(host->data());
  *packed = {fused, fused, layout.count};
  const std::size_t element = SizeOf(layout.wire_type);
  for (std::size_t i = 0; i < layout.counts.size(); ++i) {
    ScaleAndCast(tensors[i], layout.tensor_type, fused + layout.offsets[i] * element, layout.wire_type,
                 layout.counts[i], scale);
  }
}

void GradientBuckets::SubmitDevice(int plan, int bucket_number, const std::vector<const void*>& tensors,
                                   double scale, Device::Stream stream) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  DeviceBuffer& buffer = DeviceBufferOf(bucket);
  RankDevice& device = buffer.rank_device();
  const BucketLayout& layout = bucket.layout;
  const std::shared_ptr<Operation> operation = BeginReducing(bucket);
  try {
    if (!std::exchange(bucket.inputs_checked, true)) {
      for (std::size_t i = 0; i < tensors.size(); ++i) device.CheckIsHere(tensors[i], layout.counts[i]);
    }
    // On the stream that made the gradients: the caller may free or overwrite them in stream order after
    // this.
    if (bucket.unpacked_before) device.device->Wait(stream, buffer.read());
    if (bucket.gathered_before)
      device.device->Wait(stream, buffer.moved());  // its sum may have been discarded
    std::vector<Device::Piece> pieces;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      pieces.push_back({tensors[i], buffer.PlaceOf(layout, i), layout.counts[i]});
    }
    device.device->ScaleAndCast(pieces, layout.tensor_type, layout.wire_type, scale, stream);
    device.device->Record(buffer.filled(), stream);
  } catch (const std::exception& failure) {
    const Error error = ErrorOf(failure);
    progress_.Fail(error);  // the other ranks wait for a bucket that will not come
    throw error;
  }
  progress_.MakeReady(operation);
  if (const auto error = progress_.error()) throw *error;
}

}  // namespace hvpipe
