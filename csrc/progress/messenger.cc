// Starts messages and group all-reduces, and makes groups.
#include "progress/messenger.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/exit_timer.h"
#include "collectives/tags.h"

namespace hvpipe {

std::shared_ptr<Operation> Messenger::MakeOperation(const char* category, const std::string& what,
                                                    Done done) {
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->priority = kMessagePriority;
  operation->traced = category;
  operation->of_all_ranks = false;
  operation->finished = std::move(done);
  return operation;
}

void Messenger::Start(const char* category, const std::string& what, Operation::MakeCollective make,
                      OrderQueue* order, Done done) {
  const auto operation = MakeOperation(category, what, std::move(done));
  operation->AddStage(std::move(make), order);
  progress_.Enqueue({operation}, true);
}

// MPI matches messages by peer and tag only, so segments of two messages with the same ones must not mix.
OrderQueue* Messenger::OrderOf(bool sent, const MessageOptions& options) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return &orders_[{sent, options.peer, options.tag}];
}

OrderQueue* Messenger::OrderOf(int group, unsigned call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return &group_orders_[{group, call % kCallTags}];
}

MessageOptions Messenger::OptionsFor(int peer, int tag) const {
  const int rank = network_.topology().rank, size = network_.topology().size;
  if (peer < 0 || peer >= size || peer == rank) {
    throw Error("The peer of a message should be another rank of " + std::to_string(size) +
                    ". Received: peer=" + std::to_string(peer) + " on rank " + std::to_string(rank),
                ErrorKind::kUsage);
  }
  if (tag < 0 || tag >= kMessageTags) {
    throw Error("The tag of a message should be from 0 to " + std::to_string(kMessageTags - 1) +
                    ". Received: tag=" + std::to_string(tag),
                ErrorKind::kUsage);
  }
  const EngineOptions& options = network_.options();
  return {peer, tag, options.segment_bytes, options.messages_in_flight};
}

void Messenger::Send(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
                     Done done) {
  const MessageOptions options = OptionsFor(peer, tag);
  Start(
      "transfer", what, [=](const Operation&) { return network_.MakeSend(data, bytes, options); },
      OrderOf(true, options), std::move(done));
  progress_.StepOnce();
}

std::shared_ptr<AlignedBuffer> Messenger::Receive(int peer, int tag, std::size_t bytes,
                                                  const std::string& what, Done done) {
  const MessageOptions options = OptionsFor(peer, tag);
  auto buffer = std::make_shared<AlignedBuffer>(bytes);
  Start(
      "transfer", what,
      [=](const Operation&) { return network_.MakeReceive(buffer->data(), bytes, options); },
      OrderOf(false, options),
      // Keeps the buffer until nothing more can be written into it.
      [buffer, done = std::move(done)](const Error* error) { done(error); });
  return buffer;
}

int Messenger::AddGroup(const std::vector<int>& ranks, const Interrupt& interrupt) {
  if (const auto error = progress_.refusal()) throw *error;
  const Topology& topology = network_.topology();
  const bool ordered = std::is_sorted(ranks.begin(), ranks.end()) &&
                       std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end();
  if (!ordered || ranks.size() < 2 || ranks.front() < 0 || ranks.back() >= topology.size ||
      !std::binary_search(ranks.begin(), ranks.end(), topology.rank)) {
    throw Error("A group should be two or more ranks in ascending order, including rank " +
                    std::to_string(topology.rank) + ". Received: " + std::to_string(ranks.size()) + " ranks",
                ErrorKind::kUsage);
  }
  WaitForRanks(ranks, interrupt);
  const double limit_s = progress_.limit_s();
  const ExitTimer timer(
      limit_s,
      "\nhvpipe: rank " + std::to_string(topology.rank) + " of " + std::to_string(topology.size) +
          " waited " + std::to_string(std::lround(limit_s)) + " s in a call of MPI that makes a group of " +
          std::to_string(ranks.size()) +
          " ranks: all of them should take part (HVPIPE_TIMEOUT). Has one of them ended, or "
          "does it hang? This rank exits with code 1.\n",
      network_.options().abort_marker);
  const int group = network_.AddGroup(ranks);
  const std::lock_guard<std::mutex> lock(mutex_);
  group_calls_.resize(std::max(group_calls_.size(), static_cast<std::size_t>(group) + 1));
  return group;
}

// Wait until all `ranks` have called. MPI's own call to make a communicator has no deadline; this one has.
void Messenger::WaitForRanks(const std::vector<int>& ranks, const Interrupt& interrupt) {
  auto operation = std::make_shared<Operation>();
  operation->what = "making a group of " + std::to_string(ranks.size()) + " ranks";
  operation->priority = kMessagePriority;
  operation->of_all_ranks = false;
  operation->AddStage([&](const Operation&) {
    std::vector<std::unique_ptr<Collective>> signals;
    for (const int peer : ranks) {
      if (peer == network_.topology().rank) continue;
      const MessageOptions options{peer, kMakeGroupTag, 1, 1};
      signals.push_back(network_.MakeReceive(nullptr, 0, options));
      signals.push_back(network_.MakeSend(nullptr, 0, options));
    }
    return std::make_unique<ConcurrentCollectives>(std::move(signals));
  });
  progress_.Run(operation, interrupt);
}

unsigned Messenger::NextCall(int group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group < 0 || static_cast<std::size_t>(group) >= group_calls_.size()) {
    throw Error("Unknown group. Received: group=" + std::to_string(group), ErrorKind::kUsage);
  }
  return group_calls_[static_cast<std::size_t>(group)]++;
}

void Messenger::GroupAllReduce(int group, void* data, std::size_t count, DType dtype, const std::string& what,
                               Done done) {
  const unsigned call = NextCall(group);
  Start(
      "reduce", what,
      [=](const Operation&) { return network_.MakeGroupAllReduce(group, call, data, count, dtype); },
      OrderOf(group, call), std::move(done));
}

}  // namespace hvpipe
