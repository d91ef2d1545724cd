// Collect: a bucket's sum is complete, and its gradients are copied or handed out.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/vector_loops.h"
#include "engine/gradient_buckets.h"

namespace hvpipe {

// Requires mutex_.
Done GradientBuckets::TakeWaiting(Bucket& bucket) {
  if (bucket.waiting) telemetry_.counters.exposed_wait_s += Now() - bucket.collect_s;
  return std::exchange(bucket.waiting, nullptr);
}

// Runs on the driving thread when NCCL's last call for a bucket was handed to the device.
void GradientBuckets::EndLaunching(Bucket& bucket, const std::shared_ptr<bool>& handed_out) {
  Done waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (*handed_out) return;  // another thread has already reported the arrival
    bucket.launched = handed_out;
    if (!bucket.waiting || !bucket.waits_for_launch) return;
    waiting = HandOut(bucket);
  }
  waiting(nullptr);
}

// Requires mutex_. Hands a sum out that the device will complete.
Done GradientBuckets::HandOut(Bucket& bucket) {
  *std::exchange(bucket.launched, nullptr) = true;
  ++handed_out_;
  bucket.gathered_before = true;
  bucket.state = BucketState::kReduced;
  return TakeWaiting(bucket);
}

bool GradientBuckets::lost_sums() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_sums_;
}

// Runs on the driving thread when the all-reduce of a bucket has ended. If its sum was handed out before, the
// bucket may be in its next step, or gone.
void GradientBuckets::EndReducing(Bucket& bucket, const Error* error, bool* handed_out) {
  Done waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (handed_out != nullptr && std::exchange(*handed_out, true)) {
      lost_sums_ |= error != nullptr;
      --handed_out_;
      return;
    }
    bucket.launched = nullptr;
    if (error == nullptr) bucket.state = BucketState::kReduced;
    waiting = TakeWaiting(bucket);
  }
  if (waiting) waiting(error);
}

void GradientBuckets::Collect(int plan, int bucket_number, Done done, bool on_stream) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  std::optional<Error> error;
  {
    // A failing engine sets its error before it calls EndReducing. So either this call sees the error, or
    // EndReducing finds the callback that this call leaves.
    const std::lock_guard<std::mutex> lock(mutex_);
    error = progress_.error();
    if (!error && (bucket.state == BucketState::kIdle || bucket.waiting)) {
      throw Error("A bucket was collected that was not submitted. Received: bucket=" + bucket.layout.name,
                  ErrorKind::kUsage);
    }
    if (!error && on_stream && bucket.launched) {
      (void)HandOut(bucket);
    } else if (!error && bucket.state == BucketState::kReducing) {
      bucket.collect_s = Now();
      telemetry_.flight.Add(Flight::kWaits, bucket.layout.name, 0, bucket.collect_s);
      bucket.waiting = std::move(done);
      bucket.waits_for_launch = on_stream;
      return;
    }
  }
  done(error ? &*error : nullptr);
}

void GradientBuckets::Unpack(int plan, int bucket_number, const std::vector<void*>& tensors) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  CheckIsOnHost(bucket);
  EventLog& log = telemetry_.log;
  const double start = log.enabled() ? Now() : 0;
  bucket.Unpack(tensors);
  if (log.enabled()) log.Add("unpack", bucket.layout.name, start, Now());
  const std::lock_guard<std::mutex> lock(mutex_);
  bucket.state = BucketState::kIdle;
}

void GradientBuckets::Bucket::Unpack(const std::vector<void*>& tensors) const {
  if (table) return table->Unpack(tensors.front(), layout.tensor_type);
  const char* fused = static_cast<const char*>(host->data());
  const std::size_t element = SizeOf(layout.wire_type);
  for (std::size_t i = 0; i < layout.counts.size(); ++i) {
    Cast(fused + layout.offsets[i] * element, layout.wire_type, tensors[i], layout.tensor_type,
         layout.counts[i]);
  }
}

std::size_t GradientBuckets::RowsOf(int plan, int bucket) const {
  return TableOf(BucketAt(plan, bucket)).present().size();
}

void GradientBuckets::UnpackRows(int plan, int bucket_number, std::int64_t* rows, void* values) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  const TableRows& table = TableOf(bucket);
  std::copy(table.present().begin(), table.present().end(), rows);
  table.UnpackPresent(values, bucket.layout.tensor_type);
  const std::lock_guard<std::mutex> lock(mutex_);
  bucket.state = BucketState::kIdle;
}

void GradientBuckets::Discard(int plan, int bucket_number) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bucket.state == BucketState::kReduced) bucket.state = BucketState::kIdle;
}

void GradientBuckets::CheckIsOnHost(const Bucket& bucket) {
  if (!bucket.device) return;
  throw Error(
      "This bucket uses device memory. Received: arrays in host memory for bucket=" + bucket.layout.name,
      ErrorKind::kUsage);
}

TableRows& GradientBuckets::TableOf(const Bucket& bucket) {
  if (bucket.table) return *bucket.table;
  throw Error("A bucket with rows is needed. Received: rows for bucket=" + bucket.layout.name,
              ErrorKind::kUsage);
}

DeviceBuffer& GradientBuckets::DeviceBufferOf(const Bucket& bucket) {
  if (bucket.device) return *bucket.device;
  throw Error(
      "This bucket uses host memory. Received: arrays in device memory for bucket=" + bucket.layout.name,
      ErrorKind::kUsage);
}

void GradientBuckets::UnpackDevice(int plan, int bucket_number, const std::vector<void*>& tensors,
                                   Device::Stream stream) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  DeviceBuffer& buffer = DeviceBufferOf(bucket);
  RankDevice& device = buffer.rank_device();
  const BucketLayout& layout = bucket.layout;
  if (!std::exchange(bucket.outputs_checked, true)) {
    for (std::size_t i = 0; i < tensors.size(); ++i) device.CheckIsHere(tensors[i], layout.counts[i]);
  }
  std::vector<Device::Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    pieces.push_back({buffer.PlaceOf(layout, i), tensors[i], layout.counts[i]});
  }
  device.device->Wait(stream, route_.topology().size == 1 ? buffer.filled() : buffer.moved());
  device.device->ScaleAndCast(pieces, layout.wire_type, layout.tensor_type, 1.0, stream);
  device.device->Record(buffer.read(), stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  bucket.unpacked_before = true;
  bucket.state = BucketState::kIdle;
}

std::shared_ptr<AlignedBuffer> GradientBuckets::Take(int plan, int bucket_number) {
  Bucket& bucket = BucketAt(plan, bucket_number);
  CheckIsOnHost(bucket);
  if (bucket.layout.compressed()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto taken = bucket.table ? bucket.table->WholeTable() : bucket.host;
  if (taken) bucket.state = BucketState::kIdle;
  return taken;
}

}  // namespace hvpipe
