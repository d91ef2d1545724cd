// The network over MPI: the communicators and shared-memory windows of one rank.
#pragma once

#include <mpi.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/mpi_transport.h"
#include "collectives/send_budget.h"
#include "collectives/shared_window.h"
#include "collectives/text_messages.h"
#include "core/network.h"
#include "core/telemetry.h"

namespace hvpipe {

// The network over MPI, and the windows of shared memory. Owns what all collectives communicate through.
//
// Threads: see Network. Only the driving thread uses the transports and windows, so there is no lock,
// except for the list of groups. Freeing is collective; the destructor frees nothing (see Engine::Stop).
class Communicators : public Network {
 public:
  // Collective over `world`, which is duplicated. MPI must allow calls from several threads.
  Communicators(MPI_Comm world, const EngineOptions& options, Counters& counters);

  Transport& world() const { return *world_; }
  // For messages between two ranks, whose tags the user chooses.
  Transport* messages() const override { return messages_.get(); }
  TextMessages* texts() const override { return texts_.get(); }
  // The first rank of each host. Null on other ranks, and if every host has one rank or shared memory is off.
  Transport* leaders() const { return leaders_.get(); }
  // Reduces to the first rank of this host, or to all its ranks. Null if shared memory is not used,
  // or if every host has one rank.
  SharedWindow* reduce_window() const { return reduce_window_.get(); }
  // Broadcasts from the first rank of this host. Null unless there are several hosts and a reduce window.
  SharedWindow* broadcast_window() const { return broadcast_window_.get(); }

  std::unique_ptr<RecordExchange> MakeExchange(const Record& mine) override;
  const Record* EarlyRecord() override;
  std::unique_ptr<Collective> MakeAllGather(void* out, std::size_t bytes, int tag) override;
  std::unique_ptr<Collective> MakeBroadcast(void* data, std::size_t bytes, int root, int tag) override;
  std::unique_ptr<Collective> MakeSend(const void* data, std::size_t bytes,
                                       const MessageOptions& options) override;
  std::unique_ptr<Collective> MakeReceive(void* data, std::size_t bytes,
                                          const MessageOptions& options) override;
  int AddGroup(const std::vector<int>& ranks) override;
  std::unique_ptr<Collective> MakeGroupAllReduce(int group, int call, void* data, std::size_t count,
                                                 DType dtype) override;
  Transport* TransportOf(int group) const override;
  // An all-reduce in place among `ranks`, or the all-gather of RingAllReduce::Options.
  std::unique_ptr<Collective> MakeRing(Transport& ranks, void* data, std::size_t count, DType dtype, int tag,
                                       bool only_gather = false);

  void BeginPass(double now_s) override;
  double NapS(int idle_passes, bool caller_waits) const override;
  bool Barrier(double patience_s) override;
  void Free() override;

 private:
  // The communicators of all ranks and of the ranks of this host.
  struct Worlds {
    MPI_Comm own, local;
    Topology topology;
  };
  static Worlds Open(MPI_Comm world, const EngineOptions& options);
  Communicators(const Worlds& worlds, const EngineOptions& options, Counters& counters);

  Counters& counters_;
  SendBudget budget_;  // the ring messages that this rank may have under way
  std::unique_ptr<MpiTransport> world_, messages_, leaders_;
  std::unique_ptr<TextMessages> texts_;
  std::unique_ptr<SharedWindow> reduce_window_, broadcast_window_;
  std::optional<Record> early_;      // of the next rank, if it arrived before its exchange began
  mutable std::mutex groups_mutex_;  // guards the list; the driving thread uses the transports
  std::vector<std::unique_ptr<MpiTransport>> groups_;
};

}  // namespace hvpipe
