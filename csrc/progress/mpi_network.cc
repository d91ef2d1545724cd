// Splits the ranks into hosts and makes a communicator for each use.
#include "progress/mpi_network.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/event_log.h"
#include "collectives/tags.h"
#include "transport/mpi_error.h"
#include "transport/mpi_transport.h"

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

MpiNetwork::Worlds MpiNetwork::Open(MPI_Comm world, const EngineOptions& options) {
  MPI_Comm own = Duplicate(world);
  HVPIPE_MPI(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN));
  int rank = 0;
  HVPIPE_MPI(MPI_Comm_rank(own, &rank));
  MPI_Comm local = SplitIntoHosts(own, rank, options.ranks_per_host);
  return {own, local, TopologyOf(own, local)};
}

MpiNetwork::MpiNetwork(MPI_Comm world, const EngineOptions& options, Counters& counters)
    : MpiNetwork(Open(world, options), options, counters) {}

MpiNetwork::MpiNetwork(const Worlds& worlds, const EngineOptions& options, Counters& counters)
    : Network(options, worlds.topology, counters), world_(worlds.own) {
  MPI_Comm local = worlds.local;
  const auto connect = [&](MPI_Comm communicator) {
    return std::make_unique<MpiTransport>(communicator, options.fast_network, MpiTransport::Small::kSent);
  };
  const auto& rows = options.algorithms;
  const bool sums = std::any_of(rows.begin(), rows.end(),
                                [](const AlgorithmRow& row) { return row.algorithm == Algorithm::kMpi; });
  const bool hosts_have_one_rank = topology_.hosts == topology_.size;
  if (options.shared_memory && !hosts_have_one_rank) {
    // All hosts have as many ranks as all others if each has as many as the average.
    const int even = topology_.local_size * topology_.hosts == topology_.size ? 1 : 0;
    int all_even = 0;
    HVPIPE_MPI(MPI_Allreduce(&even, &all_even, 1, MPI_INT, MPI_MIN, world_));
    even_ = all_even != 0 && topology_.hosts > 1;
    const bool takes_part = even_ || topology_.local_rank == 0;
    MPI_Comm across = Split(world_, takes_part ? topology_.local_rank : MPI_UNDEFINED, topology_.rank);
    if (takes_part) {
      if (sums) across_sums_ = std::make_unique<MpiSums>(Duplicate(across));
      across_ = connect(across);
    }
    const auto window = [&] {
      auto memory = std::make_unique<MpiHostMemory>(Duplicate(local),
                                                    SharedWindow::Bytes(WindowOptions(options.slot_bytes)));
      return std::make_unique<SharedWindow>(std::move(memory), WindowOptions(options.slot_bytes));
    };
    reduce_window_ = window();
    (topology_.hosts > 1 ? broadcast_window_ : named_window_) = window();
  }
  HVPIPE_MPI(MPI_Comm_free(&local));
  message_world_ = Duplicate(world_);
  messages_ = std::make_unique<MpiTransport>(message_world_, options.fast_network);
  named_ = std::make_unique<MpiTransport>(Duplicate(world_), options.fast_network);
  texts_ = std::make_unique<MpiTextMessages>(Duplicate(world_));
  requests_ = std::make_unique<MpiTextMessages>(Duplicate(world_));
  if (sums) sums_ = std::make_unique<MpiSums>(Duplicate(world_));
  ring_ = connect(world_);
}

std::unique_ptr<Transport> MpiNetwork::MakeGroup(const std::vector<int>& ranks) {
  MPI_Group everyone = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_group(message_world_, &everyone));
  HVPIPE_MPI(MPI_Group_incl(everyone, static_cast<int>(ranks.size()), ranks.data(), &some));
  HVPIPE_MPI(MPI_Comm_create_group(message_world_, some, kGroupTag, &communicator));
  HVPIPE_MPI(MPI_Group_free(&some));
  HVPIPE_MPI(MPI_Group_free(&everyone));
  return std::make_unique<MpiTransport>(communicator, options_.fast_network, MpiTransport::Small::kSent);
}

void MpiNetwork::Poll() {
  ring_->Poll();
  messages_->Poll();
  named_->Poll();
  if (across_) across_->Poll();
  ForEachGroup([](Transport& group) { group.Poll(); });
}

bool MpiNetwork::Barrier(double patience_s) {
  MPI_Request request = MPI_REQUEST_NULL;
  const double deadline_s = Now() + patience_s;
  try {
    HVPIPE_MPI(MPI_Ibarrier(world_, &request));
    for (int all = 0; Now() < deadline_s;) {
      HVPIPE_MPI(MPI_Test(&request, &all, MPI_STATUS_IGNORE));
      if (all != 0) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  } catch (const Error&) {  // a rank has gone
  }
  return false;
}

Connect OverMpi(MPI_Comm world) {
  return [world](const EngineOptions& options, Counters& counters) {
    return std::make_unique<MpiNetwork>(world, options, counters);
  };
}

}  // namespace hvpipe
