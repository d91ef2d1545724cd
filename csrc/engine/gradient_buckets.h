// Gradient buckets: the fused buffers whose all-reduce overlaps with training.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/telemetry.h"
#include "collectives/bucket_layout.h"
#include "collectives/table_rows.h"
#include "gpu/device_buffer.h"
#include "gpu/rank_device.h"
#include "progress/agreement.h"
#include "progress/progress.h"
#include "progress/reduce.h"

namespace hvpipe {

// Where the gradients of a plan lie. Those of a bucket with rows are always in host memory.
enum class Memory { kHost, kDevice };

// A plan is a list of buckets that are reduced together in each step. The life of a bucket in a step:
//
//            BeginStep          Submit            (sum done)         Unpack or Take
//   idle  ---------------> announced -----> reducing -----> reduced ---------------> idle
//          announce.cc         submit.cc        reduce.cc          collect.cc
//
// A bucket may be announced for the next step while it is still reducing or reduced, but not submitted.
//
// Threads: any thread may call. mutex_ guards the plans, and the state, the announced operation and the
// waiting callback of each bucket. The contents of a bucket belong to the thread in Submit or Unpack, and to
// the driving thread in between; the state enforces this.
class GradientBuckets {
 public:
  // Null error: success. `scale` = this rank's share of all samples, `total` = samples of all ranks.
  using StepBegun = std::function<void(const Error* error, double scale, double total)>;

  GradientBuckets(Progress& progress, Agreement& agreement, AllReduceRoute& route, DeviceSlot& device,
                  Telemetry& telemetry)
      : progress_(progress), agreement_(agreement), route_(route), device_(device), telemetry_(telemetry) {}
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // Make the fused buffers of a plan with a number of its own. `signature` must be equal on all ranks; every
  // step checks it. Not collective: a rank may make plans that it never begins a step of.
  void AddPlan(int number, const std::string& name, std::uint64_t signature,
               std::vector<BucketLayout> layouts, Memory memory = Memory::kHost);
  // Free the plan's buffers as soon as the device no longer uses them. Does nothing while any of its buckets
  // is announced, reducing or reduced, or after an error. Not collective.
  void RemovePlan(int plan);
  const BucketLayout& layout(int plan, int bucket) const;

  // Announce a step of `samples` samples. With `reduces`, this rank will submit every bucket of the plan
  // once. `begun` is called when all ranks have announced the same step.
  void BeginStep(int plan, std::int64_t step, double samples, bool reduces, StepBegun begun);

  // Pack tensors * `scale` into the fused buffer of a bucket and let its all-reduce start.
  void Submit(int plan, int bucket, const std::vector<const void*>& tensors, double scale);
  // The same for a bucket with rows, of which `count` are given, in host memory: see TableRows::PackSlices.
  void SubmitRows(int plan, int bucket, const std::int64_t* rows, std::size_t count, const void* values,
                  double scale);
  // The same for device memory. `stream` is the stream that the tensors are made on. The pack is enqueued
  // there; the host does not wait.
  void SubmitDevice(int plan, int bucket, const std::vector<const void*>& tensors, double scale,
                    Device::Stream stream);

  // Call `done` when the sum of the bucket is complete, or at once if it is. Then call Unpack or Take once.
  // If NCCL is used, no sum completes before all buckets of the step were submitted.
  //
  // With `on_stream`, `done` may also come when NCCL's last call was handed to the device: UnpackDevice then
  // waits for it on its stream, and the host does not wait.
  void Collect(int plan, int bucket, Done done, bool on_stream = false);
  // Copy the sums out, cast to the type of the gradients.
  void Unpack(int plan, int bucket, const std::vector<void*>& tensors);
  // How many rows a bucket with rows has after the sum. Then call UnpackRows for their numbers and values.
  std::size_t RowsOf(int plan, int bucket) const;
  void UnpackRows(int plan, int bucket, std::int64_t* rows, void* values);
  // The same for device memory, enqueued on the stream that the tensors will be used on.
  void UnpackDevice(int plan, int bucket, const std::vector<void*>& tensors, Device::Stream stream);
  // Return the fused buffer itself if it holds the tensors unchanged, else null. A holder that still has it
  // when the bucket is submitted again keeps it; the bucket then gets a new buffer.
  std::shared_ptr<AlignedBuffer> Take(int plan, int bucket);
  // Drop the sum of a bucket that Collect waited for, because the step that wanted it has failed.
  void Discard(int plan, int bucket);

  // Whether the device still has to complete a sum that Collect handed out.
  bool awaits_sums() const { return handed_out_ > 0; }
  // Whether a sum that Collect handed out will not be complete, because of an error. What waits for it on the
  // device must not run.
  bool lost_sums() const;
  // Wait until the device has read all sums that it was to unpack. Returns false if that takes longer.
  bool WaitUntilRead(double patience_s) const;
  // After an error, leave all buffers allocated: MPI or NCCL may still use them.
  void Leak();

 private:
  enum class BucketState { kIdle, kReducing, kReduced };
  struct Bucket {
    explicit Bucket(BucketLayout bucket_layout) : layout(std::move(bucket_layout)) {}
    void MakeHostBuffer();
    void Pack(const std::vector<const void*>& tensors, double scale);
    void Unpack(const std::vector<void*>& tensors) const;
    // Whether the device has read the last sum.
    bool Read() const;
    BucketLayout layout;
    // One of these three holds the gradients.
    std::shared_ptr<AlignedBuffer> host;
    std::unique_ptr<DeviceBuffer> device;
    std::unique_ptr<TableRows> table;
    bool unpacked_before = false;  // from device memory, at least once
    bool gathered_before = false;  // a sum was handed out while NCCL gathered it
    // Whether the tensors of the first step were found to be on this device. Those of later steps then are as
    // well.
    bool inputs_checked = false, outputs_checked = false;
    BucketState state = BucketState::kIdle;
    std::shared_ptr<Operation> announced;  // until Submit
    // If NCCL is used, announced after it.
    std::shared_ptr<Operation> gather, arrival;
    // From the launch of the gather to its arrival: whether the sum was handed out. Null otherwise.
    std::shared_ptr<bool> launched;
    std::shared_ptr<ReduceBuffers> buffers;  // of the announced operation
    std::shared_ptr<ReduceBuffers> packed;   // of the one that is reducing
    Done waiting;                            // of a Collect that came before the sum
    bool waits_for_launch = false;           // it was a CollectOnStream
    double collect_s = 0;                    // when that Collect came
    int tag = 0;
  };
  struct Plan {
    std::string name;
    std::uint64_t signature;
    bool has_tags = false;  // from its first step on
    std::vector<std::unique_ptr<Bucket>> buckets;
  };

  // gradient_buckets.cc
  std::unique_ptr<Bucket> MakeBucket(BucketLayout layout, Memory memory);
  Plan& PlanAt(int plan) const;
  Bucket& BucketAt(int plan, int bucket) const;
  std::shared_ptr<Operation> MakeRemoval(std::shared_ptr<Plan> plan);
  void WaitForRemovals() const;
  // announce.cc
  void SetTags(Plan& plan);
  std::vector<std::shared_ptr<Operation>> AnnounceBuckets(Plan& plan);
  std::shared_ptr<Operation> MakeControl(const Plan& plan, std::int64_t step, double samples, bool reduces,
                                         StepBegun begun);
  std::shared_ptr<Operation> MakeReduction(Bucket& bucket);
  void AddDeviceStages(Operation& operation, Bucket& bucket);
  void AddTableStages(Operation& operation, const Bucket& bucket);
  void AddGatheredTableStages(Operation& operation, const Bucket& bucket, const Transport& ring);
  static std::shared_ptr<Operation> MakeOperation(const BucketLayout& layout);
  // submit.cc
  std::shared_ptr<Operation> BeginReducing(Bucket& bucket);
  // collect.cc
  void EndLaunching(Bucket& bucket, const std::shared_ptr<bool>& handed_out);
  void EndReducing(Bucket& bucket, const Error* error, bool* handed_out = nullptr);
  Done TakeWaiting(Bucket& bucket);
  Done HandOut(Bucket& bucket);
  static void CheckIsOnHost(const Bucket& bucket);
  static TableRows& TableOf(const Bucket& bucket);
  // Enqueue the reduction of an idle bucket that `pack` fills.
  void SubmitPacked(Bucket& bucket, const std::function<void()>& pack);
  static DeviceBuffer& DeviceBufferOf(const Bucket& bucket);

  int agreed_steps_ = 0;  // driving thread only
  Progress& progress_;
  Agreement& agreement_;
  AllReduceRoute& route_;
  DeviceSlot& device_;
  Telemetry& telemetry_;
  mutable std::mutex mutex_;
  std::map<int, std::unique_ptr<Plan>> plans_;  // by number; null: removed
  int tags_ = 0;                                // given to buckets so far
  bool lost_sums_ = false;
  std::atomic<int> handed_out_{0};  // sums under way
  std::atomic<int> removals_{0};    // of plans in device memory, under way
};

}  // namespace hvpipe
