// Splits the ranks into hosts and makes a communicator for each use.
#include "core/communicators.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "collectives/tags.h"
#include "core/check.h"
#include "core/event_log.h"

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

Communicators::Communicators(MPI_Comm world, const EngineOptions& options)
    : options_(options), budget_(options.messages_in_flight) {
  MPI_Comm own = Duplicate(world);
  HVPIPE_MPI(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN));
  int rank = 0;
  HVPIPE_MPI(MPI_Comm_rank(own, &rank));
  MPI_Comm local = SplitIntoHosts(own, rank, options.ranks_per_host);
  topology_ = TopologyOf(own, local);
  const bool hosts_have_one_rank = topology_.hosts == topology_.size;
  if (options.shared_memory && !hosts_have_one_rank) {
    const bool leads = topology_.local_rank == 0;
    MPI_Comm leaders = Split(own, leads ? 0 : MPI_UNDEFINED, rank);
    if (leads) leaders_ = std::make_unique<MpiTransport>(leaders);
    const Lane::Options lane{(options.slot_bytes + 63) / 64 * 64, 4};
    reduce_lane_ = std::make_unique<Lane>(Duplicate(local), lane);
    if (topology_.hosts > 1) broadcast_lane_ = std::make_unique<Lane>(Duplicate(local), lane);
  }
  HVPIPE_MPI(MPI_Comm_free(&local));
  messages_ = std::make_unique<MpiTransport>(Duplicate(own));
  world_ = std::make_unique<MpiTransport>(own);
}

bool Communicators::crowded() const {
  return static_cast<unsigned>(topology_.local_size) > std::thread::hardware_concurrency();
}

std::unique_ptr<MpiTransport> Communicators::Subset(const std::vector<int>& ranks) const {
  MPI_Group everyone = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_group(messages_->communicator(), &everyone));
  HVPIPE_MPI(MPI_Group_incl(everyone, static_cast<int>(ranks.size()), ranks.data(), &some));
  HVPIPE_MPI(MPI_Comm_create_group(messages_->communicator(), some, kGroupTag, &communicator));
  HVPIPE_MPI(MPI_Group_free(&some));
  HVPIPE_MPI(MPI_Group_free(&everyone));
  return std::make_unique<MpiTransport>(communicator);
}

void Communicators::BeginPass(double now_s) {
  budget_.BeginPass(now_s);
  world_->Poll();
  messages_->Poll();
  if (leaders_) leaders_->Poll();
}

// With the send budget spent: until a quarter of it should have drained. Otherwise a peer's message is
// missing: look often at first, since it may be the last one of a small bucket, then less and less. Keep
// looking often while a caller waits for a message, because then nothing else needs the core.
double Communicators::NapS(int idle_passes, bool caller_waits) const {
  const int most_growth = caller_waits ? 2 : 20;
  const double nap_s = budget_.empty()
                           ? budget_.QuarterS()
                           : options_.shortest_nap_s * std::pow(1.5, std::min(idle_passes, most_growth));
  return std::clamp(nap_s, options_.shortest_nap_s, options_.longest_nap_s);
}

bool Communicators::Barrier(double patience_s) const {
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
  for (const auto* lane : {&broadcast_lane_, &reduce_lane_}) {
    if (*lane) (*lane)->Free();
  }
  for (const auto* transport : {&leaders_, &messages_, &world_}) {
    if (*transport) (*transport)->Free();
  }
}

}  // namespace hvpipe
