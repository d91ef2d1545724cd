// The network over the calls of another library, such as Horovod.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/network.h"
#include "core/reduce.h"
#include "core/telemetry.h"
#include "named/call_service.h"

namespace hvpipe {

// Each collective is one named call. Names say what is sent and its tag, so they are unique among the calls
// under way, and the same on all ranks and in every step: Horovod then negotiates them from its cache.
//
// The library has no messages between two ranks. A message is a broadcast in a process set of these two,
// which must have been added to the service before (see `World.connect` in hvpipe/comm/world.py). So must the
// ranks of a group.
class DelegatedNetwork : public Network {
 public:
  DelegatedNetwork(std::shared_ptr<named::CallService> service, const Topology& topology,
                   const EngineOptions& options, Counters& counters);

  std::unique_ptr<RecordExchange> MakeExchange(const Record& mine) override;
  std::unique_ptr<Collective> MakeAllGather(void* out, std::size_t bytes, int tag) override;
  std::unique_ptr<Collective> MakeBroadcast(void* data, std::size_t bytes, int root, int tag) override;
  std::unique_ptr<Collective> MakeSend(const void* data, std::size_t bytes,
                                       const MessageOptions& options) override;
  std::unique_ptr<Collective> MakeReceive(void* data, std::size_t bytes,
                                          const MessageOptions& options) override;
  int AddGroup(const std::vector<int>& ranks) override;
  std::unique_ptr<Collective> MakeGroupAllReduce(int group, int call, void* data, std::size_t count,
                                                 DType dtype) override;
  // out = sum of in over all ranks.
  std::unique_ptr<Collective> MakeAllReduce(const ReduceBuffers& buffers, DType dtype, int tag);
  bool Barrier(double patience_s) override;
  void Free() override {}

 private:
  std::unique_ptr<Collective> Reduce(int set, const std::string& name, const ReduceBuffers& buffers,
                                     DType dtype);
  int SetOf(const std::vector<int>& ranks) const;

  const std::shared_ptr<named::CallService> service_;
  Counters& counters_;
};

// The route over the calls of another library: one call.
class DelegatedRoute : public AllReduceRoute {
 public:
  explicit DelegatedRoute(DelegatedNetwork& network)
      : AllReduceRoute(network.topology()), network_(network) {}
  void AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers, DType dtype,
                 double scale, int tag) override;

 private:
  DelegatedNetwork& network_;
};

}  // namespace hvpipe
