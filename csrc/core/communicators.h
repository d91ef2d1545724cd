// The MPI communicators and shared-memory lanes of one rank.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "collectives/lane.h"
#include "collectives/mpi_transport.h"
#include "collectives/send_budget.h"
#include "core/engine_options.h"

namespace hvpipe {

// This rank's position among all ranks and hosts.
struct Topology {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  int hosts = 1;
  int first_on_host = 0;  // the first rank on this host
};

// Owns what all collectives communicate through.
//
// Threads: made and freed by the caller of Engine. In between only the driving thread uses the transports and
// lanes, so there is no lock. Freeing is collective; the destructor frees nothing (see Engine::Stop).
class Communicators {
 public:
  // Collective over `world`, which is duplicated. MPI must allow calls from several threads.
  Communicators(MPI_Comm world, const EngineOptions& options);
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  const EngineOptions& options() const { return options_; }
  const Topology& topology() const { return topology_; }
  // Whether this host has more ranks than cores.
  bool crowded() const;

  Transport& world() const { return *world_; }
  // For messages between two ranks, whose tags the user chooses.
  Transport& messages() const { return *messages_; }
  // The first rank of each host. Null on other ranks, and if every host has one rank or shared memory is off.
  Transport* leaders() const { return leaders_.get(); }
  // Reduces to the first rank of this host, or to all its ranks. Null if shared memory is not used.
  Lane* reduce_lane() const { return reduce_lane_.get(); }
  // Broadcasts from the first rank of this host. Null unless there are several hosts and a reduce lane.
  Lane* broadcast_lane() const { return broadcast_lane_.get(); }
  // The ring messages that this rank may have under way.
  SendBudget& budget() { return budget_; }

  // A communicator of some ranks, in ascending order; collective over these ranks.
  std::unique_ptr<MpiTransport> Subset(const std::vector<int>& ranks) const;

  // Ask MPI once what has completed.
  void BeginPass(double now_s);
  // How long the progress thread sleeps after `idle_passes` passes without progress, in seconds.
  // `caller_waits`: a caller waits for a message.
  double NapS(int idle_passes, bool caller_waits) const;

  // Wait at most `patience_s` seconds; returns whether all ranks came.
  bool Barrier(double patience_s) const;
  // Collective, with nothing under way. Nothing can be used afterwards.
  void Free();

 private:
  const EngineOptions options_;
  Topology topology_;
  SendBudget budget_;
  std::unique_ptr<MpiTransport> world_, messages_, leaders_;
  std::unique_ptr<Lane> reduce_lane_, broadcast_lane_;
};

}  // namespace hvpipe
