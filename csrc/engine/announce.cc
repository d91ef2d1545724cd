// Announce: a step begins, and the all-reduce of each of its buckets is enqueued in the same order on all
// ranks.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "collectives/control.h"
#include "collectives/tags.h"
#include "engine/gradient_buckets.h"
#include "gpu/device_reduce.h"
#include "gpu/device_stages.h"

namespace hvpipe {
namespace {

std::string ShortHex(std::uint64_t value) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(value & 0xffffffffu));
  return text;
}

}  // namespace

void GradientBuckets::BeginStep(int plan_number, std::int64_t step, double samples, bool reduces,
                                StepBegun begun) {
  std::vector<std::shared_ptr<Operation>> operations;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Plan& plan = PlanAt(plan_number);
    SetTags(plan);
    operations.push_back(MakeControl(plan, step, samples, reduces, std::move(begun)));
    if (reduces) {
      const auto announced = AnnounceBuckets(plan);
      operations.insert(operations.end(), announced.begin(), announced.end());
    }
    ++telemetry_.counters.steps;
    telemetry_.flight.Add(Flight::kStep, plan.name, static_cast<std::uint64_t>(step));
  }
  // All in one call, so that the order is the same on every rank. The buckets become ready when they are
  // submitted.
  const std::shared_ptr<Operation> control = operations.front();
  progress_.Enqueue(operations, false);
  progress_.MakeReady(control);
}

// Requires mutex_. Gives message tags to the buckets of a plan that begins its first step. First steps come
// in one order on all ranks, unlike AddPlan: a rank may have plans that the others do not have.
void GradientBuckets::SetTags(Plan& plan) {
  if (std::exchange(plan.has_tags, true)) return;
  plan.signature ^= Hash("from tag " + std::to_string(tags_));
  for (auto& bucket : plan.buckets) bucket->tag = kFirstBucketTag + tags_++ % kBucketTags;
}

// The operation that checks that all ranks begin the same step and that adds up their samples.
std::shared_ptr<Operation> GradientBuckets::MakeControl(const Plan& plan, std::int64_t step, double samples,
                                                        bool reduces, StepBegun begun) {
  auto control = std::make_shared<Operation>();
  control->what = "training step " + std::to_string(step) + " of " + plan.name + " (" +
                  std::to_string(plan.buckets.size()) + " buckets, plan " + ShortHex(plan.signature) + ")";
  control->priority = kControlPriority;
  // The step number is only in the description, not in the signature: a rank may repeat a step after an
  // error.
  agreement_.AddStage(*control, samples, plan.signature ^ Hash(reduces ? "reduces" : "accumulates"));
  auto total = std::make_shared<double>(0);
  control->check = [this, size = route_.topology().size, total](Operation& operation) {
    const ControlExchange& exchange = agreement_.Checked(operation);
    for (int rank = 0; rank < size; ++rank) *total += exchange.SamplesOf(rank);
    // All ranks begin the third step, so all have ended two.
    if (++agreed_steps_ == 3) progress_.EndFirstSteps();
  };
  control->finished = [total, samples, begun = std::move(begun)](const Error* error) {
    begun(error, *total > 0 ? samples / *total : 0.0, *total);
  };
  return control;
}

// Requires mutex_. Returns the operations of a step, in the order in which to enqueue them.
std::vector<std::shared_ptr<Operation>> GradientBuckets::AnnounceBuckets(Plan& plan) {
  for (const auto& bucket : plan.buckets) {
    if (!bucket->announced) continue;
    throw Error("A step began before all buckets of the previous step were submitted. Received: bucket=" +
                    bucket->layout.name,
                ErrorKind::kUsage);
  }
  std::vector<std::shared_ptr<Operation>> operations;
  for (auto& bucket : plan.buckets) {
    bucket->announced = MakeReduction(*bucket);
    operations.push_back(bucket->announced);
  }
  // NCCL runs collectives in one order. It scatters the buckets as backward completes them, and then gathers
  // them as the next forward needs them.
  std::vector<std::shared_ptr<Operation>> gathers, arrivals;
  for (auto& bucket : plan.buckets) {
    if (bucket->gather) gathers.push_back(std::exchange(bucket->gather, nullptr));
    if (bucket->arrival) arrivals.push_back(std::exchange(bucket->arrival, nullptr));
  }
  for (auto* const each : {&gathers, &arrivals}) {
    std::stable_sort(each->begin(), each->end(),
                     [](const auto& a, const auto& b) { return a->priority < b->priority; });
    operations.insert(operations.end(), each->begin(), each->end());
  }
  return operations;
}

std::shared_ptr<Operation> GradientBuckets::MakeOperation(const BucketLayout& layout) {
  auto operation = std::make_shared<Operation>();
  operation->what = layout.name;
  operation->priority = layout.priority;
  operation->traced = "reduce";
  return operation;
}

// The stages depend only on the plan and the topology, never on the rank: all ranks must choose alike.
std::shared_ptr<Operation> GradientBuckets::MakeReduction(Bucket& bucket) {
  const auto operation = MakeOperation(bucket.layout);
  operation->finished = [this, &bucket](const Error* error) { EndReducing(bucket, error); };
  bucket.buffers = std::make_shared<ReduceBuffers>();
  if (!bucket.table) bucket.buffers->count = bucket.layout.count;
  if (bucket.device) {
    AddDeviceStages(*operation, bucket);
  } else if (bucket.table) {
    AddTableStages(*operation, bucket);
  } else if (route_.topology().size > 1) {
    route_.AddStages(*operation, bucket.buffers, bucket.layout.wire_type, 1.0, bucket.tag);
  }
  return operation;
}

// Three operations, each of which makes the next one ready: scatter, gather, arrival. The sum may be unpacked
// behind the gather on the device, so the arrival has an event of its own: the next step may record the
// bucket's event again before the arrival looks.
void GradientBuckets::AddDeviceStages(Operation& operation, Bucket& bucket) {
  RankDevice& device = bucket.device->rank_device();
  DeviceReducer reducer(device, route_);
  const DeviceReduce reduce = ReduceOf(*bucket.device, bucket.layout.wire_type, bucket.tag);
  if (!reducer.scatters()) return reducer.AddAllReduce(operation, reduce);
  const std::shared_ptr<void> arrived = OwnedEvent(*device.device);
  const auto handed_out = std::make_shared<bool>(false);
  bucket.gather = MakeOperation(bucket.layout);
  bucket.arrival = MakeOperation(bucket.layout);
  reducer.AddScatter(operation, reduce);
  reducer.AddGather(*bucket.gather, reduce, arrived.get());
  AddArrival(*bucket.arrival, *device.device, device.ranks.get(), arrived.get(), &device.arrivals);
  operation.check = [this, gather = bucket.gather](Operation&) { progress_.MakeReady(gather); };
  bucket.gather->check = [this, arrival = bucket.arrival](Operation&) { progress_.MakeReady(arrival); };
  bucket.gather->finished = [this, &bucket, handed_out](const Error* error) {
    if (error == nullptr) EndLaunching(bucket, handed_out);
  };
  operation.finished = nullptr;
  bucket.arrival->finished = [this, &bucket, handed_out, arrived](const Error* error) {
    EndReducing(bucket, error, handed_out.get());
  };
}

// First all ranks find out which rows any of them has. Then they sum these rows.
void GradientBuckets::AddTableStages(Operation& operation, const Bucket& bucket) {
  TableRows& table = *bucket.table;
  const Transport* const ring = route_.only_ring();
  if (ring != nullptr && ring->size() <= TableRows::kMostMarked) {
    return AddGatheredTableStages(operation, bucket, *ring);
  }
  const bool alone = route_.topology().size == 1;
  if (!alone) {
    const ReduceBuffers flags{table.flags(), table.flags(), table.rows()};
    route_.AddStages(operation, std::make_shared<const ReduceBuffers>(flags), TableRows::kFlagType, 1.0,
                     bucket.tag);
  }
  operation.AddStage([&table, buffers = bucket.buffers](const Operation&) {
    table.LayOutRows();
    *buffers = {table.data(), table.data(), table.count()};
    return std::make_unique<ConcurrentCollectives>(std::vector<std::unique_ptr<Collective>>());
  });
  if (!alone) route_.AddStages(operation, bucket.buffers, bucket.layout.wire_type, 1.0, bucket.tag);
}

// The same in a ring. The ranks gather the rows of each rank, if that is less to send.
void GradientBuckets::AddGatheredTableStages(Operation& operation, const Bucket& bucket,
                                             const Transport& ring) {
  TableRows& table = *bucket.table;
  const int rank = ring.rank(), ranks = ring.size(), tag = bucket.tag;
  const DType wire = bucket.layout.wire_type;
  const auto gathers = std::make_shared<bool>();
  operation.AddStage([this, &table, rank, ranks, tag](const Operation&) {
    void* const marks = table.Marks(rank, ranks);
    return route_.MakeGather(marks, table.marks_count(), TableRows::kFlagType, tag);
  });
  operation.AddStage([this, &table, rank, ranks, tag, wire, gathers](const Operation&) {
    *gathers = table.LayOutMarked(rank, ranks);
    if (*gathers) return route_.MakeGather(table.gathered(), table.gathered_count(), wire, tag);
    return route_.MakeAllReduce(*route_.only_ring(), table.data(), table.data(), table.count(), wire, tag);
  });
  operation.AddStage([&table, gathers](const Operation&) {
    if (*gathers) table.SumGathered();
    return std::make_unique<ConcurrentCollectives>(std::vector<std::unique_ptr<Collective>>());
  });
}

}  // namespace hvpipe
