// What connects the ranks of an engine: transports, and shared memory within a host. The network over MPI is
// in progress/mpi_network.h, the one over TCP sockets in progress/socket_network.h.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "base/telemetry.h"
#include "collectives/algorithm.h"
#include "collectives/collective.h"
#include "collectives/control.h"
#include "collectives/gather.h"
#include "collectives/message.h"
#include "collectives/send_budget.h"
#include "collectives/shared_memory_reduce.h"
#include "progress/engine_options.h"
#include "transport/mpi_sums.h"
#include "transport/shared_window.h"
#include "transport/text_messages.h"
#include "transport/transport.h"

namespace hvpipe {

// This rank's position among all ranks and hosts.
struct Topology {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  int hosts = 1;
  int first_on_host = 0;  // the first rank on this host
};

// Makes the collectives of one rank, and owns what they communicate through. progress/reduce.h has the route
// of all-reduces of all ranks.
//
// Threads: made and freed by the caller of Engine. Any thread may make a collective. Only the driving thread
// steps it, and only the driving thread calls BeginPass and uses transports and windows. So there is no lock,
// except for the list of groups. Freeing is collective; the destructor frees nothing (see Engine::Stop).
class Network {
 public:
  virtual ~Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  const EngineOptions& options() const { return options_; }
  const Topology& topology() const { return topology_; }
  // Whether this host has more ranks than cores.
  bool crowded() const;

  // All ranks, for rings.
  Transport& ring() const { return *ring_; }
  // The ranks of this local rank on all hosts. Null if shared memory is off or every host has one rank; if
  // hosts have different numbers of ranks, only first ranks have it.
  Transport* across() const { return across_.get(); }
  // Whether a sum among hosts goes by slices, one for each rank of a host, so that all its ranks drive the
  // network. Else its first rank drives it alone.
  bool sums_slices(std::size_t bytes) const;
  // Reduces to the first rank of this host, or to all its ranks. Null if shared memory is not used,
  // or if every host has one rank.
  SharedWindow* reduce_window() const { return reduce_window_.get(); }
  // Broadcasts from the first rank of this host, and gathers. Null unless there are several hosts and a
  // reduce window.
  SharedWindow* broadcast_window() const { return broadcast_window_.get(); }
  // An all-reduce among `ranks` from `in` to `out`, which may be `in`, by the algorithm that fits their
  // number and the size.
  std::unique_ptr<Collective> MakeAllReduce(Transport& ranks, const void* in, void* out, std::size_t count,
                                            DType dtype, int tag);
  // What sums an array of so many bytes among all ranks, or those of `across`, by MPI's own algorithms. Null
  // if that was not asked for, or if no MPI connects them. The ranks make such sums in one order.
  MpiSums* SumsFor(const Transport& ranks, std::size_t bytes) const;
  // The ring, or the all-gather of RingAllReduce::Options.
  std::unique_ptr<Collective> MakeRing(Transport& ranks, const void* in, void* out, std::size_t count,
                                       DType dtype, int tag, bool only_gather = false);

  // Between all ranks. `tag` tells collectives apart that are under way at the same time.
  std::unique_ptr<ControlExchange> MakeExchange(const Record& mine, std::uint64_t requests,
                                                const void* payload);
  // The fastest algorithm for an array of so many bytes; not MPI's own.
  Algorithm AlgorithmOf(const Transport& ranks, std::size_t bytes) const;
  // A record that has arrived from another rank before this rank's exchange; empty if none has. The next
  // exchange still gets it. For the driving thread.
  std::optional<Record> EarlyRecord();
  // `bytes` of each peer come to `out`, in their order, on all peers or on `root` alone.
  std::unique_ptr<Collective> MakeGather(Transport& ranks, const void* in, void* out,
                                         const std::vector<std::size_t>& bytes, std::optional<int> root,
                                         int tag);
  // From `root`, a peer of the transport, to all others.
  std::unique_ptr<Collective> MakeBroadcast(Transport& ranks, void* data, std::size_t bytes, int root,
                                            int tag);
  std::unique_ptr<Collective> MakeExchange(Transport& ranks, const std::vector<SentPart>& sends,
                                           const std::vector<ReceivedPart>& receives, int tag);
  // In a window of this host's ranks, to all of them.
  std::unique_ptr<Collective> MakeReduce(SharedWindow& window, OperationTag tag, const void* in, void* out,
                                         std::size_t count, DType dtype, SharedMemoryReduce::Sum sum);
  std::unique_ptr<Collective> MakeBroadcast(SharedWindow& window, OperationTag tag, void* data,
                                            std::size_t bytes, int root);
  // All-gathers and broadcasts of all ranks that call in one order.
  Transport& copies() const { return copies_ ? *copies_ : *ring_; }

  // Between two ranks.
  Transport& messages() const { return *messages_; }
  std::unique_ptr<Collective> MakeSend(const void* data, std::size_t bytes, const MessageOptions& options);
  std::unique_ptr<Collective> MakeReceive(void* data, std::size_t bytes, const MessageOptions& options);

  // Between some ranks. Collective over `ranks`, which ascend; returns the number of the group.
  int AddGroup(const std::vector<int>& ranks);
  Transport& TransportOf(int group) const;
  // In place. `call` is the number of this all-reduce in the group, the same on all its ranks.
  std::unique_ptr<Collective> MakeGroupAllReduce(int group, unsigned call, void* data, std::size_t count,
                                                 DType dtype);

  // For the watchdog.
  TextMessages& texts() const { return *texts_; }

  // For calls by name: between all ranks, what they tell the coordinator, and the ranks that have ended as
  // far as the network can see that. For the driving thread.
  Transport& named() const { return *named_; }
  // Connects all ranks. Null unless they share one host and shared memory is used.
  SharedWindow* named_window() const { return named_window_.get(); }
  TextMessages& requests() const { return *requests_; }
  virtual std::vector<int> Lost() { return {}; }

  // Find out once what has completed.
  void BeginPass(double now_s);
  // How long the progress thread sleeps after `idle_passes` passes without progress, in seconds.
  // `caller_waits`: a caller waits for a message.
  double NapS(int idle_passes, bool caller_waits) const;

  static SharedWindow::Options WindowOptions(std::size_t slot_bytes) {
    return {(slot_bytes + 63) / 64 * 64, 4};
  }

  // How often a caller that waits looks again at once before it yields its core.
  virtual int Spins() const = 0;
  // Wait at most `patience_s` seconds; returns whether all ranks came.
  virtual bool Barrier(double patience_s) = 0;
  // Collective, with nothing under way. Nothing can be used afterwards.
  virtual void Free();

 protected:
  // The maker of a network fills in the members below.
  Network(const EngineOptions& options, const Topology& topology, Counters& counters);

  virtual std::unique_ptr<Transport> MakeGroup(const std::vector<int>& ranks) = 0;
  virtual void Poll() = 0;
  // Calls `what` for each group.
  template <typename What>
  void ForEachGroup(const What& what) const {
    const std::lock_guard<std::mutex> lock(groups_mutex_);
    for (const auto& group : groups_) what(*group);
  }

  const EngineOptions options_;
  const Topology topology_;
  Counters& counters_;
  std::unique_ptr<Transport> ring_, messages_, named_, across_;
  bool even_ = false;                  // all hosts have the same number of ranks
  std::unique_ptr<Transport> copies_;  // all-gathers and broadcasts; null: by ring_
  std::unique_ptr<TextMessages> texts_, requests_;
  std::unique_ptr<MpiSums> sums_, across_sums_;  // null without MPI
  std::unique_ptr<SharedWindow> reduce_window_, broadcast_window_, named_window_;

 private:
  const std::vector<AlgorithmRow>& RowsFor(const Transport& ranks) const;

  SendBudget budget_;                // the ring messages that this rank may have under way
  std::vector<char> early_;          // the message of the next rank, if it arrived before its exchange began
  mutable std::mutex groups_mutex_;  // guards the list; the driving thread uses the transports
  std::vector<std::unique_ptr<Transport>> groups_;
};

// Joins the ranks. Collective. The counters outlive the network.
using Connect = std::function<std::unique_ptr<Network>(const EngineOptions& options, Counters& counters)>;

}  // namespace hvpipe
