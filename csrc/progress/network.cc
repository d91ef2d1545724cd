// Makes collectives over the transports of a network.
#include "progress/network.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "collectives/butterfly.h"
#include "collectives/ring.h"
#include "collectives/shared_memory_broadcast.h"
#include "collectives/tags.h"

namespace hvpipe {

Network::Network(const EngineOptions& options, const Topology& topology, Counters& counters)
    : options_(options), topology_(topology), counters_(counters), budget_(options.messages_in_flight) {}

bool Network::crowded() const {
  return static_cast<unsigned>(topology_.local_size) > std::thread::hardware_concurrency();
}

bool Network::sums_slices(std::size_t bytes) const { return even_ && bytes >= 2 * options_.slot_bytes; }

std::unique_ptr<Collective> Network::MakeRing(Transport& ranks, const void* in, void* out, std::size_t count,
                                              DType dtype, int tag, bool only_gather) {
  RingAllReduce::Options ring;
  ring.segment_bytes = options_.segment_bytes;
  ring.receives_in_flight = options_.messages_in_flight;
  ring.tag = tag;
  ring.only_gather = only_gather;
  return std::make_unique<RingAllReduce>(ranks, budget_, counters_, in, out, count, dtype, ring);
}

const std::vector<AlgorithmRow>& Network::RowsFor(const Transport& ranks) const {
  static const std::vector<AlgorithmRow> none;
  const std::size_t wanted = options_.algorithms_ranks;
  return wanted == 0 || wanted == static_cast<std::size_t>(ranks.size()) ? options_.algorithms : none;
}

Algorithm Network::AlgorithmOf(const Transport& ranks, std::size_t bytes) const {
  const auto choose = [&](const std::vector<AlgorithmRow>& rows) {
    return AlgorithmFor(ranks.size(), bytes, ranks.message_bytes(), bytes > ranks.most_at_once(), rows);
  };
  const Algorithm chosen = choose(RowsFor(ranks));
  return chosen == Algorithm::kMpi ? choose({}) : chosen;
}

std::unique_ptr<Collective> Network::MakeAllReduce(Transport& ranks, const void* in, void* out,
                                                   std::size_t count, DType dtype, int tag) {
  const auto butterfly = [&](std::vector<ButterflyStep> steps) {
    const ButterflyAllReduce::Options options{options_.segment_bytes, options_.messages_in_flight, tag};
    return std::make_unique<ButterflyAllReduce>(ranks, budget_, counters_, in, out, count, dtype,
                                                std::move(steps), options);
  };
  switch (AlgorithmOf(ranks, count * SizeOf(dtype))) {
    case Algorithm::kDoubling:
      return butterfly(DoublingSteps(ranks.rank(), ranks.size(), count));
    case Algorithm::kHalving:
      return butterfly(HalvingSteps(ranks.rank(), ranks.size(), count));
    case Algorithm::kRing:
    case Algorithm::kMpi:
      break;
  }
  return MakeRing(ranks, in, out, count, dtype, tag);
}

MpiSums* Network::SumsFor(const Transport& ranks, std::size_t bytes) const {
  if (AlgorithmFor(ranks.size(), bytes, 1, false, RowsFor(ranks)) != Algorithm::kMpi) return nullptr;
  return &ranks == across_.get() ? across_sums_.get() : &ranks == ring_.get() ? sums_.get() : nullptr;
}

std::unique_ptr<ControlExchange> Network::MakeExchange(const Record& mine, std::uint64_t requests,
                                                       const void* payload) {
  return std::make_unique<ControlExchange>(*ring_, counters_, mine, requests, payload, kControlTag,
                                           std::exchange(early_, {}));
}

// A rank sends its first message to the rank below it, so each rank looks at the rank above.
std::optional<Record> Network::EarlyRecord() {
  if (early_.empty())
    early_ = ControlExchange::TakeMessage(*ring_, (topology_.rank + 1) % topology_.size, kControlTag);
  if (early_.empty()) return std::nullopt;
  return ControlExchange::RecordIn(early_);
}

std::unique_ptr<Collective> Network::MakeGather(Transport& ranks, const void* in, void* out,
                                                const std::vector<std::size_t>& bytes,
                                                std::optional<int> root, int tag) {
  const int rank = ranks.rank();
  const bool receives_all = root.value_or(rank) == rank;
  auto* target = static_cast<char*>(out);
  std::vector<SentPart> sends;
  std::vector<ReceivedPart> receives;
  for (int peer = 0; peer < ranks.size(); ++peer) {
    const std::size_t theirs = bytes[static_cast<std::size_t>(peer)];
    if (peer != rank && root.value_or(peer) == peer)
      sends.push_back({peer, in, bytes[static_cast<std::size_t>(rank)]});
    if (!receives_all) continue;
    if (peer != rank) receives.push_back({peer, target, theirs});
    if (peer == rank && in != target && theirs > 0) std::memcpy(target, in, theirs);
    target += theirs;
  }
  return MakeExchange(ranks, sends, receives, tag);
}

std::unique_ptr<Collective> Network::MakeExchange(Transport& ranks, const std::vector<SentPart>& sends,
                                                  const std::vector<ReceivedPart>& receives, int tag) {
  const MessageOptions message{0, tag, options_.segment_bytes, options_.messages_in_flight};
  return hvpipe::MakeExchange(ranks, counters_, sends, receives, message);
}

std::unique_ptr<Collective> Network::MakeBroadcast(Transport& ranks, void* data, std::size_t bytes, int root,
                                                   int tag) {
  const MessageOptions message{0, tag, options_.segment_bytes, options_.messages_in_flight};
  return std::make_unique<Broadcast>(ranks, counters_, data, bytes, root, message);
}

std::unique_ptr<Collective> Network::MakeReduce(SharedWindow& window, OperationTag tag, const void* in,
                                                void* out, std::size_t count, DType dtype,
                                                SharedMemoryReduce::Sum sum) {
  return std::make_unique<SharedMemoryReduce>(window, counters_, std::move(tag), in, out, count, dtype,
                                              std::move(sum), SharedMemoryReduce::Result::kAll);
}

std::unique_ptr<Collective> Network::MakeBroadcast(SharedWindow& window, OperationTag tag, void* data,
                                                   std::size_t bytes, int root) {
  return std::make_unique<SharedMemoryBroadcast>(window, counters_, std::move(tag), data, bytes, root);
}

std::unique_ptr<Collective> Network::MakeSend(const void* data, std::size_t bytes,
                                              const MessageOptions& options) {
  return std::make_unique<MessageSend>(*messages_, counters_, data, bytes, options);
}

std::unique_ptr<Collective> Network::MakeReceive(void* data, std::size_t bytes,
                                                 const MessageOptions& options) {
  return std::make_unique<MessageReceive>(*messages_, counters_, data, bytes, options);
}

int Network::AddGroup(const std::vector<int>& ranks) {
  auto group = MakeGroup(ranks);
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  groups_.push_back(std::move(group));
  return static_cast<int>(groups_.size() - 1);
}

Transport& Network::TransportOf(int group) const {
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  return *groups_.at(static_cast<std::size_t>(group));
}

std::unique_ptr<Collective> Network::MakeGroupAllReduce(int group, unsigned call, void* data,
                                                        std::size_t count, DType dtype) {
  return MakeAllReduce(TransportOf(group), data, data, count, dtype, static_cast<int>(call % kCallTags));
}

void Network::BeginPass(double now_s) {
  budget_.BeginPass(now_s);
  Poll();
}

// With the send budget spent: until a quarter of it should have drained. Otherwise a peer's message is
// missing: look often at first, since it may be the last one of a small bucket, then less and less. Keep
// looking often while a caller waits for a message, because then nothing else needs the core.
double Network::NapS(int idle_passes, bool caller_waits) const {
  const int most_growth = caller_waits ? 2 : 20;
  const double grown_s = options_.shortest_nap_s * std::pow(1.5, std::min(idle_passes, most_growth));
  return std::clamp(budget_.empty() ? budget_.QuarterS() : grown_s, options_.shortest_nap_s,
                    options_.longest_nap_s);
}

void Network::Free() {
  texts_->Free();
  requests_->Free();
  ForEachGroup([](Transport& group) { group.Free(); });
  for (const auto* window : {&named_window_, &broadcast_window_, &reduce_window_}) {
    if (*window) (*window)->Free();
  }
  for (const auto* sums : {&across_sums_, &sums_}) {
    if (*sums) (*sums)->Free();
  }
  for (const auto* transport : {&across_, &copies_, &named_, &messages_, &ring_}) {
    if (*transport) (*transport)->Free();
  }
}

}  // namespace hvpipe
