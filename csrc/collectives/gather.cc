// Parts that go straight to their peers, and broadcast down a tree or along a chain.
#include "collectives/gather.h"

#include <algorithm>

namespace hvpipe {

// Each rank begins with the ranks after it, so that not all send to one at first.
std::unique_ptr<Collective> MakeExchange(Transport& transport, Counters& counters,
                                         const std::vector<SentPart>& sends,
                                         const std::vector<ReceivedPart>& receives, MessageOptions message) {
  std::vector<std::unique_ptr<Collective>> messages;
  for (const ReceivedPart& part : receives) {
    message.peer = part.peer;
    if (part.bytes > 0)
      messages.push_back(
          std::make_unique<MessageReceive>(transport, counters, part.data, part.bytes, message));
  }
  const auto after = std::find_if(sends.begin(), sends.end(),
                                  [&](const SentPart& part) { return part.peer > transport.rank(); });
  const auto add = [&](const SentPart& part) {
    message.peer = part.peer;
    if (part.bytes > 0)
      messages.push_back(std::make_unique<MessageSend>(transport, counters, part.data, part.bytes, message));
  };
  std::for_each(after, sends.end(), add);
  std::for_each(sends.begin(), after, add);
  return std::make_unique<ConcurrentCollectives>(std::move(messages));
}

Broadcast::Broadcast(Transport& transport, Counters& counters, void* data, std::size_t bytes, int root,
                     const MessageOptions& message)
    : transport_(transport),
      counters_(counters),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      root_(root),
      message_(message),
      segments_(bytes == 0 ? 0 : SegmentsOf(bytes, message.segment_bytes)) {
  const int ranks = transport.size(), place = (transport.rank() - root + ranks) % ranks;
  std::size_t rounds = 0;
  while (1 << rounds < ranks) ++rounds;
  const bool chain = static_cast<std::size_t>(ranks) + segments_ < 2 + segments_ * rounds;
  if (chain) {
    parent_ = place == 0 ? -1 : (place - 1 + root) % ranks;
    if (place + 1 < ranks) AddChild(place + 1);
  } else {
    // The parent of a place has its lowest bit cleared. The child with the most ranks below it comes first.
    parent_ = place == 0 ? -1 : ((place & (place - 1)) + root) % ranks;
    const int lowest = place == 0 ? 1 << rounds : place & -place;
    for (int bit = lowest / 2; bit > 0; bit /= 2) {
      if (place + bit < ranks) AddChild(place + bit);
    }
  }
  if (place == 0) received_ = posted_ = segments_;
}

void Broadcast::AddChild(int place) { children_.push_back({(place + root_) % transport_.size()}); }

bool Broadcast::done() const { return received_ == segments_ && Late() == nullptr; }

bool Broadcast::Step() {
  bool moved = Receive();
  for (Child& child : children_) moved = Send(child) || moved;
  return moved;
}

bool Broadcast::Receive() {
  bool moved = false;
  while (posted_ < segments_ && tickets_.size() < static_cast<std::size_t>(message_.segments_in_flight)) {
    const Range segment = Segment(posted_++);
    tickets_.push_back(transport_.Irecv(data_ + segment.first, segment.count, parent_, message_.tag));
  }
  while (!tickets_.empty() && transport_.Test(tickets_.front())) {
    tickets_.pop_front();
    counters_.network_bytes_received += Segment(received_++).count;
    moved = true;
  }
  return moved;
}

bool Broadcast::Send(Child& child) {
  bool moved = false;
  while (child.posted < received_ &&
         child.tickets.size() < static_cast<std::size_t>(message_.segments_in_flight)) {
    const Range segment = Segment(child.posted++);
    child.tickets.push_back(transport_.Isend(data_ + segment.first, segment.count, child.rank, message_.tag));
    counters_.network_bytes_sent += segment.count;
    ++counters_.messages_sent;
    moved = true;
  }
  while (!child.tickets.empty() && transport_.Test(child.tickets.front())) {
    child.tickets.pop_front();
    ++child.sent;
    moved = true;
  }
  return moved;
}

// The first child that has not taken all; null: none.
const Broadcast::Child* Broadcast::Late() const {
  for (const Child& child : children_) {
    if (child.sent < segments_) return &child;
  }
  return nullptr;
}

std::vector<int> Broadcast::Ranks() const {
  if (received_ < segments_) return {transport_.RankInJob(parent_)};
  const Child* const late = Late();
  return late == nullptr ? std::vector<int>{} : std::vector<int>{transport_.RankInJob(late->rank)};
}

std::string Broadcast::Waiting() const {
  const Child* const late = Late();
  if (received_ == segments_ && late == nullptr) return "nothing";
  const std::string rank = "rank " + std::to_string(Ranks().front());
  return received_ < segments_ ? "broadcast segment " + std::to_string(received_ + 1) + " of " +
                                     std::to_string(segments_) + " from " + rank
                               : rank + " to take broadcast segment " + std::to_string(late->sent + 1);
}

}  // namespace hvpipe
