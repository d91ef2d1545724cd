// All-reduces of device memory among some ranks: by NCCL if it carries messages, else through host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/telemetry.h"
#include "gpu/device_memory.h"
#include "gpu/nccl.h"
#include "gpu/rank_device.h"
#include "progress/messenger.h"
#include "progress/network.h"
#include "progress/operation.h"

namespace hvpipe {

// One rank's part of such an all-reduce. Shared by the stages of its operation. After it is enqueued only the
// driving thread uses it.
struct GroupReduce {
  GroupReduce(RankDevice& device, int of_group, unsigned of_call, std::size_t elements, DType type)
      : group(of_group),
        call(of_call),
        count(elements),
        dtype(type),
        memory(device.device_pool.Take(bytes())),
        host_memory(device.messages_by_nccl() ? nullptr : device.host_pool.Take(bytes())),
        begun(OwnedEvent(*device.device)),
        ended(OwnedEvent(*device.device)) {}
  std::size_t bytes() const { return count * SizeOf(dtype); }

  const int group;      // of Network
  const unsigned call;  // the number of this all-reduce in the group, the same on all its ranks
  const std::size_t count;
  const DType dtype;
  const std::shared_ptr<void> memory;       // on the device; summed in place
  const std::shared_ptr<void> host_memory;  // null by NCCL
  const OwnedHandle begun, ended;           // begun: when `memory` is filled
  std::shared_ptr<const void> copied_from;  // kept alive until then

  // By NCCL only:
  struct Summand {
    std::uint64_t count;
    std::int64_t dtype;
  };
  Summand mine{count, static_cast<std::int64_t>(dtype)};
  std::vector<Summand> others;  // of the other ranks, on the first
  nccl::UniqueId id{};          // of the group's communicator
  bool called = false;
};

// Adds the stages of an all-reduce to its operation. Has no state of its own, so make one wherever it is
// needed; any thread may. The stages run on the driving thread.
//
// By NCCL, an all-reduce shares the rule of messages (see NcclMessages): it takes the device for itself, only
// when the data of all ranks of the group exist, and a lower rank takes its device before a higher one.
//
//   first rank    hears what all sum | takes the device, tells the next rank          | NCCL
//   other ranks   tell the first     | hear the one before, take it, tell the next    | NCCL
class GroupReducer {
 public:
  GroupReducer(RankDevice& device, Network& network, Messenger& messenger, Counters& counters)
      : device_(device), network_(network), messenger_(messenger), counters_(counters) {}
  void AddStages(Operation& operation, const std::shared_ptr<GroupReduce>& reduce);

 private:
  void AddThroughHost(Operation& operation, const std::shared_ptr<GroupReduce>& reduce, OrderQueue* order);
  void AddTurn(Operation& operation, const std::shared_ptr<GroupReduce>& reduce, OrderQueue* order);
  void AddNccl(Operation& operation, const std::shared_ptr<GroupReduce>& reduce, OrderQueue* order);

  RankDevice& device_;
  Network& network_;
  Messenger& messenger_;
  Counters& counters_;
};

}  // namespace hvpipe
