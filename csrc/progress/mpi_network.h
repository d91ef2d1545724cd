// The network over MPI: the communicators and shared-memory windows of one rank.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "progress/network.h"

namespace hvpipe {

class MpiNetwork : public Network {
 public:
  // Collective over `world`, which is duplicated. MPI must allow calls from several threads.
  MpiNetwork(MPI_Comm world, const EngineOptions& options, Counters& counters);

  int Spins() const override { return 4000; }  // about 50 ns each
  bool Barrier(double patience_s) override;

 protected:
  std::unique_ptr<Transport> MakeGroup(const std::vector<int>& ranks) override;
  void Poll() override;

 private:
  // The communicators of all ranks and of the ranks of this host.
  struct Worlds {
    MPI_Comm own, local;
    Topology topology;
  };
  static Worlds Open(MPI_Comm world, const EngineOptions& options);
  MpiNetwork(const Worlds& worlds, const EngineOptions& options, Counters& counters);

  const MPI_Comm world_;
  MPI_Comm message_world_ = MPI_COMM_NULL;
};

// Between the ranks of `world`, which is duplicated. MPI must allow calls from several threads.
Connect OverMpi(MPI_Comm world);

}  // namespace hvpipe
