// What connects the ranks of an engine: MPI (core/communicators.h), or calls of another library
// (core/delegated_network.h).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/collective.h"
#include "collectives/control.h"
#include "collectives/message.h"
#include "core/dtype.h"
#include "core/engine_options.h"

namespace hvpipe {

class TextMessages;
class Transport;

// This rank's position among all ranks and hosts.
struct Topology {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  int hosts = 1;
  int first_on_host = 0;  // the first rank on this host
};

// Makes the collectives of one rank. All-reduces of all ranks have a route of their own (core/reduce.h).
//
// Threads: made and freed by the caller of Engine. Any thread may make a collective. Only the driving thread
// steps it, and only the driving thread calls BeginPass.
class Network {
 public:
  Network(const EngineOptions& options, const Topology& topology) : options_(options), topology_(topology) {}
  virtual ~Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  const EngineOptions& options() const { return options_; }
  const Topology& topology() const { return topology_; }
  // Whether this host has more ranks than cores.
  bool crowded() const;

  // Between all ranks. `tag` tells collectives apart that are under way at the same time.
  virtual std::unique_ptr<RecordExchange> MakeExchange(const Record& mine) = 0;
  // A record that has arrived from another rank before this rank's exchange; null if no record has, or if
  // this network cannot tell. The next exchange still gets it. For the driving thread.
  virtual const Record* EarlyRecord() { return nullptr; }
  // `out` has size * `bytes` bytes; this rank's own data must be in its place already.
  virtual std::unique_ptr<Collective> MakeAllGather(void* out, std::size_t bytes, int tag) = 0;
  virtual std::unique_ptr<Collective> MakeBroadcast(void* data, std::size_t bytes, int root, int tag) = 0;

  // Between two ranks.
  virtual std::unique_ptr<Collective> MakeSend(const void* data, std::size_t bytes,
                                               const MessageOptions& options) = 0;
  virtual std::unique_ptr<Collective> MakeReceive(void* data, std::size_t bytes,
                                                  const MessageOptions& options) = 0;

  // Between some ranks. Collective over `ranks`, which ascend; returns the number of the group.
  virtual int AddGroup(const std::vector<int>& ranks) = 0;
  // In place. `call` is the number of this all-reduce in the group, the same on all its ranks.
  virtual std::unique_ptr<Collective> MakeGroupAllReduce(int group, int call, void* data, std::size_t count,
                                                         DType dtype) = 0;

  // What only MPI has, and NCCL's set-up and messages need; null without MPI.
  virtual Transport* messages() const { return nullptr; }
  virtual Transport* TransportOf(int /*group*/) const { return nullptr; }

  // For the watchdog; null without MPI.
  virtual TextMessages* texts() const { return nullptr; }

  // Find out once what has completed.
  virtual void BeginPass(double /*now_s*/) {}
  // How long the progress thread sleeps after `idle_passes` passes without progress, in seconds.
  // `caller_waits`: a caller waits for a message.
  virtual double NapS(int idle_passes, bool caller_waits) const;

  // Wait at most `patience_s` seconds; returns whether all ranks came.
  virtual bool Barrier(double patience_s) = 0;
  // Collective, with nothing under way. Nothing can be used afterwards.
  virtual void Free() = 0;

 protected:
  const EngineOptions options_;
  const Topology topology_;
};

}  // namespace hvpipe
