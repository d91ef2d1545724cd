// Splits the ranks into hosts and makes a communicator for each use.
#include "core/communicators.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "collectives/gather.h"
#include "collectives/ring.h"
#include "collectives/tags.h"
#include "core/event_log.h"
#include "core/mpi_error.h"

namespace hvpipe {
namespace {

MPI_Comm Duplicate(MPI_Comm communicator) {
  MPI_Comm copy = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_dup(communicator, &copy));
  return copy;
}

MPI_Comm Split(MPI_Comm world, int color, int rank) {
  MPI_Comm subset = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_split(world, color, rank, &subset));
  return subset;
}

// The communicator of this rank's host.
MPI_Comm SplitIntoHosts(MPI_Comm world, int rank, int ranks_per_host) {
  if (ranks_per_host > 0) return Split(world, rank / ranks_per_host, rank);
  MPI_Comm local = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local));
  return local;
}

Topology TopologyOf(MPI_Comm world, MPI_Comm local) {
  Topology found;
  HVPIPE_MPI(MPI_Comm_rank(world, &found.rank));
  HVPIPE_MPI(MPI_Comm_size(world, &found.size));
  HVPIPE_MPI(MPI_Comm_rank(local, &found.local_rank));
  HVPIPE_MPI(MPI_Comm_size(local, &found.local_size));
  found.first_on_host = found.rank;
  HVPIPE_MPI(MPI_Bcast(&found.first_on_host, 1, MPI_INT, 0, local));
  const int leads = found.local_rank == 0 ? 1 : 0;
  HVPIPE_MPI(MPI_Allreduce(&leads, &found.hosts, 1, MPI_INT, MPI_SUM, world));
  return found;
}

}  // namespace

Communicators::Worlds Communicators::Open(MPI_Comm world, const EngineOptions& options) {
  MPI_Comm own = Duplicate(world);
  HVPIPE_MPI(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN));
  int rank = 0;
  HVPIPE_MPI(MPI_Comm_rank(own, &rank));
  MPI_Comm local = SplitIntoHosts(own, rank, options.ranks_per_host);
  return {own, local, TopologyOf(own, local)};
}

Communicators::Communicators(MPI_Comm world, const EngineOptions& options, Counters& counters)
    : Communicators(Open(world, options), options, counters) {}

Communicators::Communicators(const Worlds& worlds, const EngineOptions& options, Counters& counters)
    : Network(options, worlds.topology), counters_(counters), budget_(options.messages_in_flight) {
  MPI_Comm own = worlds.own, local = worlds.local;
  const bool hosts_have_one_rank = topology_.hosts == topology_.size;
  if (options.shared_memory && !hosts_have_one_rank) {
    const bool leads = topology_.local_rank == 0;
    MPI_Comm leaders = Split(own, leads ? 0 : MPI_UNDEFINED, topology_.rank);
    if (leads) leaders_ = std::make_unique<MpiTransport>(leaders);
    const SharedWindow::Options window{(options.slot_bytes + 63) / 64 * 64, 4};
    reduce_window_ = std::make_unique<SharedWindow>(Duplicate(local), window);
    if (topology_.hosts > 1) broadcast_window_ = std::make_unique<SharedWindow>(Duplicate(local), window);
  }
  HVPIPE_MPI(MPI_Comm_free(&local));
  messages_ = std::make_unique<MpiTransport>(Duplicate(own));
  texts_ = std::make_unique<TextMessages>(Duplicate(own));
  world_ = std::make_unique<MpiTransport>(own);
}

std::unique_ptr<RecordExchange> Communicators::MakeExchange(const Record& mine) {
  return std::make_unique<ControlExchange>(*world_, mine, kControlTag, std::exchange(early_, std::nullopt));
}

// A rank sends its first record to the rank below it, so each rank looks at the rank above.
const Record* Communicators::EarlyRecord() {
  if (!early_) early_ = TakeRecord(*world_, (topology_.rank + 1) % topology_.size, kControlTag);
  return early_ ? &*early_ : nullptr;
}

std::unique_ptr<Collective> Communicators::MakeAllGather(void* out, std::size_t bytes, int tag) {
  return std::make_unique<RingAllGather>(*world_, counters_, out, bytes, options_.segment_bytes, tag);
}

std::unique_ptr<Collective> Communicators::MakeBroadcast(void* data, std::size_t bytes, int root, int tag) {
  return std::make_unique<ChainBroadcast>(*world_, counters_, data, bytes, root, options_.segment_bytes, tag);
}

std::unique_ptr<Collective> Communicators::MakeSend(const void* data, std::size_t bytes,
                                                    const MessageOptions& options) {
  return std::make_unique<MessageSend>(*messages_, counters_, data, bytes, options);
}

std::unique_ptr<Collective> Communicators::MakeReceive(void* data, std::size_t bytes,
                                                       const MessageOptions& options) {
  return std::make_unique<MessageReceive>(*messages_, counters_, data, bytes, options);
}

std::unique_ptr<Collective> Communicators::MakeRing(Transport& ranks, void* data, std::size_t count,
                                                    DType dtype, int tag, bool only_gather) {
  RingAllReduce::Options ring;
  ring.segment_bytes = options_.segment_bytes;
  ring.receives_in_flight = options_.messages_in_flight;
  ring.tag = tag;
  ring.only_gather = only_gather;
  return std::make_unique<RingAllReduce>(ranks, budget_, counters_, data, count, dtype, ring);
}

int Communicators::AddGroup(const std::vector<int>& ranks) {
  MPI_Group everyone = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_group(messages_->communicator(), &everyone));
  HVPIPE_MPI(MPI_Group_incl(everyone, static_cast<int>(ranks.size()), ranks.data(), &some));
  HVPIPE_MPI(MPI_Comm_create_group(messages_->communicator(), some, kGroupTag, &communicator));
  HVPIPE_MPI(MPI_Group_free(&some));
  HVPIPE_MPI(MPI_Group_free(&everyone));
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  groups_.push_back(std::make_unique<MpiTransport>(communicator));
  return static_cast<int>(groups_.size() - 1);
}

Transport* Communicators::TransportOf(int group) const {
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  return groups_.at(static_cast<std::size_t>(group)).get();
}

std::unique_ptr<Collective> Communicators::MakeGroupAllReduce(int group, int call, void* data,
                                                              std::size_t count, DType dtype) {
  return MakeRing(*TransportOf(group), data, count, dtype, call % kCallTags);
}

void Communicators::BeginPass(double now_s) {
  budget_.BeginPass(now_s);
  world_->Poll();
  messages_->Poll();
  if (leaders_) leaders_->Poll();
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  for (const auto& group : groups_) group->Poll();
}

// With the send budget spent: until a quarter of it should have drained.
double Communicators::NapS(int idle_passes, bool caller_waits) const {
  if (!budget_.empty()) return Network::NapS(idle_passes, caller_waits);
  return std::clamp(budget_.QuarterS(), options_.shortest_nap_s, options_.longest_nap_s);
}

bool Communicators::Barrier(double patience_s) {
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

void Communicators::Free() {
  texts_->Free();
  for (const auto& group : groups_) group->Free();
  for (const auto* window : {&broadcast_window_, &reduce_window_}) {
    if (*window) (*window)->Free();
  }
  for (const auto* transport : {&leaders_, &messages_, &world_}) {
    if (*transport) (*transport)->Free();
  }
}

}  // namespace hvpipe
