// The life of a bucket: planned, announced, packed, reduced, unpacked, removed.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/engine.h"
#include "collectives/tags.h"

namespace hvpipe {
namespace {

std::string ShortHex(std::uint64_t value) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(value & 0xffffffffu));
  return text;
}

}  // namespace

int Engine::AddPlan(const std::string& name, std::uint64_t signature, std::vector<BucketLayout> buckets,
                    Memory memory) {
  auto plan = std::make_unique<Plan>();
  plan->name = name;
  plan->signature = signature;
  if (memory == Memory::kDevice) {
    plan->signature ^= DeviceSignature();
    CheckRoom(buckets);
  }
  for (BucketLayout& layout : buckets) {
    auto bucket = std::make_unique<Bucket>(std::move(layout));
    if (memory == Memory::kDevice) {
      bucket->layout.row = 0;
      bucket->device =
          std::make_unique<DeviceBuffer>(device(), bucket->layout.count, bucket->layout.wire_type);
    } else if (const std::size_t row = bucket->layout.row; row > 0) {
      const std::size_t count = bucket->layout.count;
      if (bucket->layout.counts.size() != 1 || count % row != 0) {
        throw Error("Rows are of one table, and equal. Received: bucket=" + bucket->layout.name,
                    ErrorKind::kUsage);
      }
      bucket->table = std::make_unique<TableRows>(count / row, row, bucket->layout.wire_type);
    } else {
      bucket->NewBuffer();
    }
    plan->buckets.push_back(std::move(bucket));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  plan->signature ^= Hash("from bucket " + std::to_string(buckets_));  // tags follow from it
  for (auto& bucket : plan->buckets) bucket->tag = kFirstBucketTag + buckets_++ % kBucketTags;
  plans_.push_back(std::move(plan));
  return static_cast<int>(plans_.size() - 1);
}

// All of a plan is made at once, whatever the size of its buckets: so that is what there must be room for.
void Engine::CheckRoom(const std::vector<BucketLayout>& buckets) const {
  std::size_t bytes = 0;
  for (const BucketLayout& bucket : buckets) bytes += bucket.bytes();
  Device& on = *device().device;
  if (on.FreeRoom().free >= bytes) return;
  throw NoRoom(on, bytes, "the gradients' " + std::to_string(buckets.size()) + " buckets");
}

Engine::Plan& Engine::PlanAt(int plan) const {
  if (plan < 0 || static_cast<std::size_t>(plan) >= plans_.size()) {
    throw Error("Unknown plan. Received: plan=" + std::to_string(plan), ErrorKind::kUsage);
  }
  if (!plans_[static_cast<std::size_t>(plan)]) {
    throw Error("The plan was removed. Received: plan=" + std::to_string(plan), ErrorKind::kUsage);
  }
  return *plans_[static_cast<std::size_t>(plan)];
}

// What it has on a device goes in NCCL's order: see Removal.
void Engine::RemovePlan(int index) {
  std::shared_ptr<Plan> removed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Plan& plan = PlanAt(index);
    const bool idle = std::all_of(plan.buckets.begin(), plan.buckets.end(), [](const auto& bucket) {
      return bucket->state == BucketState::kIdle && !bucket->operation;
    });
    if (!idle || stopped_ || progress_->error()) return;
    removed = std::move(plans_[static_cast<std::size_t>(index)]);
  }
  if (removed->buckets.empty() || !removed->buckets.front()->device) return;
  try {
    progress_->Enqueue({Removal(removed)}, true);
  } catch (const Error&) {  // of another thread, just now
    new std::shared_ptr<Plan>(removed);
  }
}

Engine::Bucket& Engine::bucket(int plan, int index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Plan& of = PlanAt(plan);
  if (index < 0 || static_cast<std::size_t>(index) >= of.buckets.size()) {
    throw Error("Unknown bucket. Received: bucket=" + std::to_string(index), ErrorKind::kUsage);
  }
  return *of.buckets[static_cast<std::size_t>(index)];
}

const BucketLayout& Engine::layout(int plan, int index) const { return bucket(plan, index).layout; }

std::shared_ptr<Operation> Engine::EmptyOperation(const BucketLayout& layout) {
  auto operation = std::make_shared<Operation>();
  operation->what = layout.name;
  operation->priority = layout.priority;
  operation->traced = "reduce";
  return operation;
}

// Rank and engine options decide nothing here: a bucket's way is the same on all ranks of a host.
std::shared_ptr<Operation> Engine::BucketOperation(Bucket& bucket) {
  const BucketLayout& layout = bucket.layout;
  const auto operation = EmptyOperation(layout);
  const auto finished = [this, &bucket](const Error* error) { BucketReduced(bucket, error); };
  bucket.ends = std::make_shared<Ends>();
  if (!bucket.device) {
    if (bucket.table) {
      AddTableStages(*operation, bucket);
    } else if (size_ > 1) {
      AddReduceStages(*operation, bucket.ends, layout.wire_type, 1.0, bucket.tag);
    }
    operation->finished = finished;
    return operation;
  }
  DeviceBuffer& buffer = *bucket.device;
  const DeviceReduce reduce{buffer.data(),   buffer.data(),  buffer.host(), buffer.count(), layout.wire_type,
                            buffer.filled(), buffer.moved(), bucket.tag,    &buffer};
  if (device_->rail == nullptr) {
    AddDeviceReduce(*operation, reduce);
    operation->finished = finished;
    return operation;
  }
  AddScatter(*operation, reduce);
  bucket.gather = EmptyOperation(layout);
  AddGather(*bucket.gather, reduce);
  bucket.gather->finished = finished;
  operation->check = [this, gather = bucket.gather](Operation&) { progress_->MakeReady(gather); };
  return operation;
}

// First which rows any rank has, then their sum.
void Engine::AddTableStages(Operation& operation, const Bucket& bucket) {
  TableRows& table = *bucket.table;
  if (size_ > 1) {
    const auto flags = std::make_shared<const Ends>(Ends{table.flags(), table.flags(), table.rows()});
    AddReduceStages(operation, flags, TableRows::kFlagType, 1.0, bucket.tag);
  }
  operation.stages.push_back({[&table, ends = bucket.ends](const Operation&) -> std::unique_ptr<Collective> {
                                table.MakeRoom();
                                *ends = {table.data(), table.data(), table.count()};
                                return std::make_unique<Together>(std::vector<std::unique_ptr<Collective>>());
                              },
                              nullptr, nullptr});
  if (size_ > 1) AddReduceStages(operation, bucket.ends, bucket.layout.wire_type, 1.0, bucket.tag);
}

void Engine::BeginStep(int plan_index, std::int64_t step, double samples, bool reduces, StepBegun begun) {
  std::vector<std::shared_ptr<Operation>> announced;
  auto control = std::make_shared<Operation>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Plan& plan = PlanAt(plan_index);
    control->what = "training step " + std::to_string(step) + " of " + plan.name + " (" +
                    std::to_string(plan.buckets.size()) + " buckets, plan " + ShortHex(plan.signature) + ")";
    control->priority = kControlPriority;
    // The step number is in the words alone: a rank that repeats a step after an error is told apart there.
    AddControlStage(*control, samples, plan.signature ^ Hash(reduces ? "reduces" : "accumulates"));
    if (reduces) {
      for (const auto& bucket : plan.buckets) {
        if (!bucket->operation) continue;
        throw Error(
            "A step began before the buckets of the step before it were submitted. Received: bucket=" +
                bucket->layout.name,
            ErrorKind::kUsage);
      }
      for (auto& bucket : plan.buckets) {
        bucket->operation = BucketOperation(*bucket);
        announced.push_back(bucket->operation);
      }
      // NCCL scatters every bucket before it gathers the first: a gather waits for messages between hosts,
      // and what comes behind it in NCCL's one order would wait as well.
      for (auto& bucket : plan.buckets) {
        if (bucket->gather) announced.push_back(std::exchange(bucket->gather, nullptr));
      }
    }
    ++counters_.steps;
  }
  struct Outcome {
    double total = 0;
  };
  auto outcome = std::make_shared<Outcome>();
  control->check = [this, outcome](Operation& operation) {
    const auto& exchange = static_cast<const ControlExchange&>(*operation.stages.front().collective);
    exchange.CheckAgreement();
    for (int rank = 0; rank < size_; ++rank) outcome->total += exchange.of(rank).samples;
  };
  control->finished = [outcome, samples, begun = std::move(begun)](const Error* error) {
    begun(error, outcome->total > 0 ? samples / outcome->total : 0.0, outcome->total);
  };
  // In one go, so that every rank has the same order.
  std::vector<std::shared_ptr<Operation>> step_operations{control};
  step_operations.insert(step_operations.end(), announced.begin(), announced.end());
  progress_->Enqueue(step_operations, false);
  progress_->MakeReady(control);
}

bool Engine::Announced() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& plan : plans_) {
    if (!plan) continue;
    for (const auto& bucket : plan->buckets) {
      if (bucket->operation) return true;
    }
  }
  return false;
}

std::shared_ptr<Operation> Engine::Claim(Bucket& target) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (target.state != BucketState::kIdle || !target.operation) {
    throw Error("A bucket was submitted that " +
                    std::string(target.operation ? "still holds the step before" : "no step announced") +
                    ". Received: bucket=" + target.layout.name,
                ErrorKind::kUsage);
  }
  target.state = BucketState::kReducing;
  return std::exchange(target.operation, nullptr);
}

void Engine::Submit(int plan, int index, const std::vector<const void*>& tensors, double scale) {
  Bucket& target = bucket(plan, index);
  if (target.device) {
    throw Error(
        "The plan is one of device memory. Received: arrays in host memory for bucket=" + target.layout.name,
        ErrorKind::kUsage);
  }
  const std::shared_ptr<Operation> operation = Claim(target);
  const double start = log_.enabled() ? Now() : 0;
  try {
    target.Pack(tensors, scale);
  } catch (const std::exception& failure) {
    const auto* const known = dynamic_cast<const Error*>(&failure);
    const Error error = known != nullptr ? *known : Error(failure.what());
    progress_->Fail(error);  // the others were told of a bucket that will not come
    throw error;
  }
  if (log_.enabled()) log_.Add("pack", target.layout.name, start, Now());
  progress_->MakeReady(operation);
  if (const auto error = progress_->error()) throw *error;
}

void Engine::Bucket::Pack(const std::vector<const void*>& tensors, double scale) {
  if (table) return table->Pack(tensors.front(), layout.tensor_type, scale);
  // The fence pairs with the release of whoever gave the buffer back.
  if (buffer.use_count() > 1) {
    NewBuffer();
  } else {
    std::atomic_thread_fence(std::memory_order_acquire);
  }
  char* fused = static_cast<char*>(buffer->data());
  *ends = {fused, fused, layout.count};
  const std::size_t element = SizeOf(layout.wire_type);
  for (std::size_t i = 0; i < layout.counts.size(); ++i) {
    PackScaled(tensors[i], layout.tensor_type, fused + layout.offsets[i] * element, layout.wire_type,
               layout.counts[i], scale);
  }
}

void Engine::BucketReduced(Bucket& reduced, const Error* error) {
  Done waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error == nullptr) reduced.state = BucketState::kReduced;
    waiting = std::exchange(reduced.waiting, nullptr);
    if (waiting) counters_.exposed_wait_s += Now() - reduced.asked_s;
  }
  if (waiting) waiting(error);
}

void Engine::Collect(int plan, int index, Done done) {
  Bucket& target = bucket(plan, index);
  std::optional<Error> error;
  {
    // An engine that fails sets its error before it comes to BucketReduced: so either that is seen here, or
    // it finds who waits there.
    const std::lock_guard<std::mutex> lock(mutex_);
    error = progress_->error();
    if (!error && (target.state == BucketState::kIdle || target.waiting)) {
      throw Error("A bucket was collected that was not submitted. Received: bucket=" + target.layout.name,
                  ErrorKind::kUsage);
    }
    if (!error && target.state == BucketState::kReducing) {
      target.asked_s = Now();
      target.waiting = std::move(done);
      return;
    }
  }
  done(error ? &*error : nullptr);
}

void Engine::Unpack(int plan, int index, const std::vector<void*>& tensors) {
  Bucket& source = bucket(plan, index);
  const double start = log_.enabled() ? Now() : 0;
  source.Unpack(tensors);
  if (log_.enabled()) log_.Add("unpack", source.layout.name, start, Now());
  const std::lock_guard<std::mutex> lock(mutex_);
  source.state = BucketState::kIdle;
}

void Engine::Bucket::Unpack(const std::vector<void*>& tensors) const {
  if (table) return table->Unpack(tensors.front(), layout.tensor_type);
  const char* fused = static_cast<const char*>(buffer->data());
  const std::size_t element = SizeOf(layout.wire_type);
  for (std::size_t i = 0; i < layout.counts.size(); ++i) {
    hvpipe::Unpack(fused + layout.offsets[i] * element, layout.wire_type, tensors[i], layout.tensor_type,
                   layout.counts[i]);
  }
}

std::shared_ptr<AlignedBuffer> Engine::Take(int plan, int index) {
  Bucket& source = bucket(plan, index);
  if (source.layout.compressed()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto taken = source.table ? source.table->Whole() : source.buffer;
  if (taken) source.state = BucketState::kIdle;
  return taken;
}

// The gaps between tensors travel too: as zeros, not as whatever the memory held.
void Engine::Bucket::NewBuffer() {
  buffer = std::make_shared<AlignedBuffer>(layout.bytes());
  std::memset(buffer->data(), 0, layout.bytes());
}

}  // namespace hvpipe
