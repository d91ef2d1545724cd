// Messages between two ranks and all-reduces among some ranks. No call waits, except AddGroup.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "collectives/message.h"
#include "progress/network.h"
#include "progress/progress.h"

namespace hvpipe {

// Host-memory messages and groups of ranks.
//
// Threads: any thread may call. mutex_ guards the counts of groups and the map of order queues; the driving
// thread uses the queues themselves.
class Messenger {
 public:
  Messenger(Progress& progress, Network& network) : progress_(progress), network_(network) {}
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // Send `bytes` to `peer`. The data must not change until `done`. Messages of one tag between two ranks keep
  // their order; tags are 0 to 32766.
  void Send(int peer, int tag, const void* data, std::size_t bytes, const std::string& what, Done done);
  // Receive `bytes` from `peer`. The buffer is filled when `done` is called.
  std::shared_ptr<AlignedBuffer> Receive(int peer, int tag, std::size_t bytes, const std::string& what,
                                         Done done);

  // Make a group of ranks and return its number. Only these ranks call, in the same order. Waits for all of
  // them.
  int AddGroup(const std::vector<int>& ranks, const Interrupt& interrupt);
  // In place: data = sum over the ranks of the group, which all call this in the same order.
  void GroupAllReduce(int group, void* data, std::size_t count, DType dtype, const std::string& what,
                      Done done);

  // The number of the group's next all-reduce, the same on all its ranks.
  unsigned NextCall(int group);
  // For messages of device memory, which share the tags and the order of these messages.
  static std::shared_ptr<Operation> MakeOperation(const char* category, const std::string& what, Done done);
  // Check the peer and the tag.
  MessageOptions OptionsFor(int peer, int tag) const;
  // The queue of messages with this peer, tag and direction.
  OrderQueue* OrderOf(bool sent, const MessageOptions& options);
  // The queue of a group's all-reduces whose numbers share a tag.
  OrderQueue* OrderOf(int group, unsigned call);
  // Callers that wait for a message, plus messages of device memory under way. The waiting callers count
  // themselves.
  const std::shared_ptr<std::atomic<int>>& awaited() const { return awaited_; }

 private:
  void Start(const char* category, const std::string& what, Operation::MakeCollective make, OrderQueue* order,
             Done done);
  void WaitForRanks(const std::vector<int>& ranks, const Interrupt& interrupt);

  Progress& progress_;
  Network& network_;
  const std::shared_ptr<std::atomic<int>> awaited_ = std::make_shared<std::atomic<int>>(0);
  mutable std::mutex mutex_;
  std::vector<unsigned> group_calls_;                            // by group; may wrap round
  std::map<std::tuple<bool, int, int>, OrderQueue> orders_;      // by direction (sent), peer and tag
  std::map<std::pair<int, unsigned>, OrderQueue> group_orders_;  // by group and tag
};

}  // namespace hvpipe
