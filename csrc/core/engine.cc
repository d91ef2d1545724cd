// The engine of a rank: its communicators and thread, and which collective serves which ranks.
#include "core/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "collectives/ring.h"
#include "collectives/tags.h"

namespace hvpipe {
namespace {

constexpr double kLeaveS = 10;  // the longest wait for the others at the end

MPI_Comm Duplicate(MPI_Comm communicator) {
  MPI_Comm copy = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_dup(communicator, &copy));
  return copy;
}

MPI_Comm Split(MPI_Comm world, int color, int rank) {
  MPI_Comm part = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_split(world, color, rank, &part));
  return part;
}

}  // namespace

Engine::Engine(MPI_Comm world, EngineOptions options)
    : options_(options), log_(options.trace), budget_(options.messages_in_flight) {
  MPI_Comm own = Duplicate(world);
  HVPIPE_MPI(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN));
  HVPIPE_MPI(MPI_Comm_rank(own, &rank_));
  HVPIPE_MPI(MPI_Comm_size(own, &size_));
  MPI_Comm local = MPI_COMM_NULL;
  if (options.ranks_per_host > 0) {
    local = Split(own, rank_ / options.ranks_per_host, rank_);
  } else {
    HVPIPE_MPI(MPI_Comm_split_type(own, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &local));
  }
  HVPIPE_MPI(MPI_Comm_rank(local, &local_rank_));
  HVPIPE_MPI(MPI_Comm_size(local, &local_size_));
  host_ = rank_;
  HVPIPE_MPI(MPI_Bcast(&host_, 1, MPI_INT, 0, local));
  const int leader = local_rank_ == 0 ? 1 : 0;
  HVPIPE_MPI(MPI_Allreduce(&leader, &hosts_, 1, MPI_INT, MPI_SUM, own));
  single_ranked_hosts_ = hosts_ == size_;

  if (options.shared_memory && !single_ranked_hosts_) {
    MPI_Comm leaders = Split(own, leader == 1 ? 0 : MPI_UNDEFINED, rank_);
    if (leader == 1) leaders_ = std::make_unique<MpiTransport>(leaders);
    const Lane::Options lane{(options.slot_bytes + 63) / 64 * 64, 4};
    up_ = std::make_unique<Lane>(Duplicate(local), lane);
    if (hosts_ > 1) down_ = std::make_unique<Lane>(Duplicate(local), lane);
  }
  HVPIPE_MPI(MPI_Comm_free(&local));
  messages_ = std::make_unique<MpiTransport>(Duplicate(own));
  world_ = std::make_unique<MpiTransport>(own);
  const bool crowded = static_cast<unsigned>(local_size_) > std::thread::hardware_concurrency();
  const Progress::Options progress{options.timeout_s, [this](int idle_passes) { return NapS(idle_passes); },
                                   crowded, [this](double now_s) { BeginPass(now_s); },
                                   [this] {
                                     EndPosted(*progress_->error());
                                     AbortDevice();
                                   }};
  progress_ = std::make_unique<Progress>(progress, counters_, log_);
}

// What MPI is to free is left to the end of the process, unless Stop did: freeing is collective, and ranks
// destroy their engines when they please. After an error, messages that were under way still name buffers.
Engine::~Engine() {
  progress_->Stop();
  AbortDevice();  // before the buffers that are registered with it are freed; not if it was closed
  if (!progress_->error() && NcclHasAborted(kLeaveS)) return;
  (void)progress_.release();
  for (auto& plan : plans_) (void)plan.release();
  (void)device_.release();
}

void Engine::BeginPass(double now_s) {
  budget_.BeginPass(now_s);
  world_->Poll();
  messages_->Poll();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& group : groups_) group->transport->Poll();
  }
  if (leaders_) leaders_->Poll();
}

// With the network full, until some of it has drained. With room left a peer's message is what is waited for:
// first often, since it may be the last of a small bucket, then less and less; often all the time where a
// caller stands and waits for a message, as nothing else needs the core.
double Engine::NapS(int idle_passes) const {
  const int most_growth = *awaited_ > 0 ? 2 : 20;
  const double nap_s = budget_.empty()
                           ? budget_.QuarterS()
                           : options_.shortest_nap_s * std::pow(1.5, std::min(idle_passes, most_growth));
  return std::clamp(nap_s, options_.shortest_nap_s, options_.longest_nap_s);
}

// After an error the peers may be gone; and what they had sent may yet come, and must find its communicator:
// where that was freed, Open MPI was seen to abort in the next one that took its place. So all ranks free, or
// none does.
void Engine::Stop() {
  if (stopped_.exchange(true)) return;
  const double patience_s = std::min(kLeaveS, options_.timeout_s);
  progress_->Drain(patience_s);
  progress_->Stop();
  EndPosted(ShutDown());
  if (progress_->error()) {
    (void)NcclHasAborted(patience_s);
    return;
  }
  // Twice: the barrier of one that comes when the others have given up ends at once, since they had begun it.
  // That they are still here is what a second one says.
  if (!AllLeave(patience_s) || !AllLeave(patience_s) || !LeaveNccl(patience_s)) return;
  for (const auto* lane : {&down_, &up_}) {
    if (*lane) (*lane)->Free();
  }
  for (auto& group : groups_) group->transport->Free();
  for (const auto* transport : {&leaders_, &messages_, &world_}) {
    if (*transport) (*transport)->Free();
  }
}

// Whether NCCL is done with aborting what was aborted.
bool Engine::NcclHasAborted(double patience_s) const {
  if (!device_) return true;
  const auto all = device_->communicators();
  return std::all_of(all.begin(), all.end(), [&](const auto* each) { return each->Aborted(patience_s); });
}

// Closes NCCL's communicators, where there are any; false where another rank did not do so as well. NCCL
// waits for all ranks of the host there: so only once all are known to have come, since one may take long
// over what it writes at the end.
bool Engine::LeaveNccl(double patience_s) {
  if (!device_) return true;
  const auto all = device_->communicators();
  try {
    for (NcclCommunicator* const communicator : all) communicator->BeginClose();
    for (NcclCommunicator* const communicator : all) communicator->Close(patience_s);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDeadline) throw;
    return false;
  }
  return true;
}

// Whether all ranks have come here within `patience_s`.
bool Engine::AllLeave(double patience_s) const {
  MPI_Request request = MPI_REQUEST_NULL;
  HVPIPE_MPI(MPI_Ibarrier(world_->communicator(), &request));
  const double deadline_s = Now() + patience_s;
  for (int all = 0;;) {
    HVPIPE_MPI(MPI_Test(&request, &all, MPI_STATUS_IGNORE));
    if (all != 0) return true;
    if (Now() > deadline_s) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::unique_ptr<Collective> Engine::LaneSum(const std::string& what, std::uint64_t sequence, const Ends& ends,
                                            DType dtype, double scale, LaneReduce::Result result) {
  LaneTag tag{Hash(what), sequence, what};
  return std::make_unique<LaneReduce>(*up_, counters_, std::move(tag), ends.in, ends.out, ends.count, dtype,
                                      scale, result);
}

//   one host            every host one rank     several hosts, several ranks on some
//   lane: all-reduce    ring                    lane: to the host's first rank; ring of these; lane: back
void Engine::AddReduceStages(Operation& operation, std::shared_ptr<const Ends> ends, DType dtype,
                             double scale, int tag) {
  const bool lane_alone = up_ && hosts_ == 1;
  if (up_) {
    const auto result = lane_alone ? LaneReduce::Result::kAll : LaneReduce::Result::kLeader;
    operation.stages.push_back({[=](const Operation& op) -> std::unique_ptr<Collective> {
                                  return LaneSum(op.what, op.sequence(), *ends, dtype,
                                                 lane_alone ? scale : 1.0, result);
                                },
                                &lane_order_, nullptr});
  }
  if (lane_alone) return;
  Transport* ring = up_ ? leaders_.get() : world_.get();
  if (ring != nullptr && ring->size() > 1) {
    operation.stages.push_back({[=](const Operation&) {
                                  if (!up_ && ends->in != ends->out)
                                    std::memcpy(ends->out, ends->in, ends->count * SizeOf(dtype));
                                  return Ring(*ring, ends->out, ends->count, dtype, tag);
                                },
                                nullptr, nullptr});
  }
  if (down_ && local_size_ > 1) {
    // The first rank of a host sends in the order in which rings end.
    operation.stages.push_back({[=](const Operation& op) -> std::unique_ptr<Collective> {
                                  LaneTag lane_tag{Hash(op.what), op.sequence(), op.what};
                                  return std::make_unique<LaneBroadcast>(*down_, counters_,
                                                                         std::move(lane_tag), ends->out,
                                                                         ends->count * SizeOf(dtype), 0);
                                },
                                nullptr, nullptr});
  }
  if (scale != 1.0) {
    auto previous = std::move(operation.check);
    operation.check = [=](Operation& op) {
      if (previous) previous(op);
      Scale(ends->out, dtype, ends->count, scale);
    };
  }
}

std::unique_ptr<Collective> Engine::Ring(Transport& ranks, void* data, std::size_t count, DType dtype,
                                         int tag) {
  RingAllReduce::Options ring;
  ring.segment_bytes = options_.segment_bytes;
  ring.receives_in_flight = options_.messages_in_flight;
  ring.tag = tag;
  return std::make_unique<RingAllReduce>(ranks, budget_, counters_, data, count, dtype, ring);
}

void Engine::AddControlStage(Operation& operation, double samples, std::uint64_t signature) {
  operation.stages.push_back({[=](const Operation& op) -> std::unique_ptr<Collective> {
                                return std::make_unique<ControlExchange>(
                                    *world_, MakeRecord(signature, samples, op.what), kControlTag);
                              },
                              &control_order_, nullptr});
}

namespace {

std::mutex default_mutex;
std::shared_ptr<Engine>& DefaultSlot() {
  static std::shared_ptr<Engine> engine;
  return engine;
}

}  // namespace

void SetDefaultEngine(std::shared_ptr<Engine> engine) {
  const std::lock_guard<std::mutex> lock(default_mutex);
  DefaultSlot() = std::move(engine);
}

std::shared_ptr<Engine> DefaultEngine() {
  const std::lock_guard<std::mutex> lock(default_mutex);
  return DefaultSlot();
}

}  // namespace hvpipe
