// Adds plans, finds their buckets, and removes plans.
#include "engine/gradient_buckets.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "gpu/device_stages.h"

namespace hvpipe {

void GradientBuckets::AddPlan(int number, const std::string& name, std::uint64_t signature,
                              std::vector<BucketLayout> layouts, Memory memory) {
  auto plan = std::make_unique<Plan>();
  plan->name = name;
  plan->signature = signature;
  if (memory == Memory::kDevice) {
    const RankDevice& device = device_.get();
    plan->signature ^= device.Signature();
    std::size_t bytes = 0;  // of all its buckets there: a plan allocates them all now
    for (const BucketLayout& layout : layouts) bytes += layout.row > 0 ? 0 : layout.bytes();
    WaitForRemovals();
    device.CheckFreeMemory(bytes, "the gradients' " + std::to_string(layouts.size()) + " buckets");
  }
  for (BucketLayout& layout : layouts) plan->buckets.push_back(MakeBucket(std::move(layout), memory));
  const std::lock_guard<std::mutex> lock(mutex_);
  plans_[number] = std::move(plan);
}

std::unique_ptr<GradientBuckets::Bucket> GradientBuckets::MakeBucket(BucketLayout layout, Memory memory) {
  auto bucket = std::make_unique<Bucket>(std::move(layout));
  const std::size_t row = bucket->layout.row, count = bucket->layout.count;
  if (row > 0) {
    if (bucket->layout.counts.size() != 1 || count == 0 || count % row != 0) {
      throw Error(
          "A bucket with rows should hold one table of equal rows. Received: bucket=" + bucket->layout.name,
          ErrorKind::kUsage);
    }
    bucket->table =
        std::make_unique<TableRows>(count / row, row, bucket->layout.wire_type, memory == Memory::kDevice);
  } else if (memory == Memory::kDevice) {
    bucket->device = std::make_unique<DeviceBuffer>(device_.get(), count, bucket->layout.wire_type);
  } else {
    bucket->MakeHostBuffer();
  }
  return bucket;
}

// Cleared, because the gaps between tensors are sent as well.
void GradientBuckets::Bucket::MakeHostBuffer() {
  host = std::make_shared<AlignedBuffer>(layout.bytes());
  std::memset(host->data(), 0, layout.bytes());
}

// Requires mutex_.
GradientBuckets::Plan& GradientBuckets::PlanAt(int plan) const {
  const auto found = plans_.find(plan);
  if (found == plans_.end()) {
    throw Error(
        "A step should use a plan of this session: after shutdown() and init(), compile models again "
        "and trace functions anew. Received: plan=" +
            std::to_string(plan) + " of another session",
        ErrorKind::kUsage);
  }
  if (!found->second) {
    throw Error("The plan was removed. Received: plan=" + std::to_string(plan), ErrorKind::kUsage);
  }
  return *found->second;
}

GradientBuckets::Bucket& GradientBuckets::BucketAt(int plan, int bucket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Plan& found = PlanAt(plan);
  if (bucket < 0 || static_cast<std::size_t>(bucket) >= found.buckets.size()) {
    throw Error("Unknown bucket. Received: bucket=" + std::to_string(bucket), ErrorKind::kUsage);
  }
  return *found.buckets[static_cast<std::size_t>(bucket)];
}

const BucketLayout& GradientBuckets::layout(int plan, int bucket) const {
  return BucketAt(plan, bucket).layout;
}

void GradientBuckets::RemovePlan(int plan) {
  std::unique_ptr<Plan> idle_plan;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (plans_.count(plan) == 0) return;  // of an engine before, whose ranks were lost
    const Plan& found = PlanAt(plan);
    const bool idle = std::all_of(found.buckets.begin(), found.buckets.end(), [](const auto& bucket) {
      return bucket->state == BucketState::kIdle && !bucket->announced;
    });
    if (!idle || progress_.refusal()) return;
    idle_plan = std::move(plans_[plan]);
  }
  const auto& buckets = idle_plan->buckets;
  if (std::none_of(buckets.begin(), buckets.end(),
                   [](const auto& bucket) { return bucket->device != nullptr; }))
    return;
  ++removals_;
  const std::shared_ptr<Plan> removed(idle_plan.release(), [this](const Plan* ended) {
    delete ended;
    --removals_;
  });
  try {
    progress_.Enqueue({MakeRemoval(removed)}, true);
  } catch (const Error&) {  // the engine failed in another thread just now: leak the plan, as Leak does
    new std::shared_ptr<Plan>(removed);
  }
}

// A model that is compiled anew needs the memory of its plan before.
void GradientBuckets::WaitForRemovals() const {
  constexpr double kPatienceS = 10;
  const double end_s = Now() + kPatienceS;
  while (removals_ > 0 && Now() < end_s && !progress_.refusal()) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// An operation of this rank alone, in turn with NCCL's collectives: only the driving thread may call NCCL. It
// owns the plan, which ends with it.
std::shared_ptr<Operation> GradientBuckets::MakeRemoval(std::shared_ptr<Plan> plan) {
  RankDevice* const device = &device_.get();
  auto operation = std::make_shared<Operation>();
  operation->what = "end of " + plan->name;
  operation->of_all_ranks = false;
  const auto remove = [device, plan = std::move(plan)] {
    if (device->ranks && !device->ranks->Ready()) return false;
    for (const auto& bucket : plan->buckets) {
      if (!bucket->Read()) return false;
    }
    for (const auto& bucket : plan->buckets) {
      if (bucket->device) bucket->device->Deregister();
    }
    return true;
  };
  operation->AddStage([remove](const Operation&) { return std::make_unique<DeviceLaunch>(remove); },
                      device->ranks ? &device->order : nullptr);
  return operation;
}

bool GradientBuckets::Bucket::Read() const {
  const auto reached = [this](Device::Event event) { return device->rank_device().device->Reached(event); };
  return (!unpacked_before || reached(device->read())) && (!gathered_before || reached(device->moved()));
}

// NCCL's memory may not be freed before: unlike cudaFree, ncclMemFree does not wait for the device.
bool GradientBuckets::WaitUntilRead(double patience_s) const {
  const double end_s = Now() + patience_s;
  const auto all_read = [this] {
    return std::all_of(plans_.begin(), plans_.end(), [](const auto& each) {
      const auto& plan = each.second;
      return !plan || std::all_of(plan->buckets.begin(), plan->buckets.end(),
                                  [](const auto& bucket) { return bucket->Read(); });
    });
  };
  try {
    while (!all_read()) {
      if (Now() > end_s) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (const Error&) {  // the device is lost
    return false;
  }
  return true;
}

void GradientBuckets::Leak() {
  for (auto& [number, plan] : plans_) (void)plan.release();
}

}  // namespace hvpipe
