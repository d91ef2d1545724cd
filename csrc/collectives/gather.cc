// Parts that go straight to their peers, and broadcast along a chain.
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

ChainBroadcast::ChainBroadcast(Transport& transport, Counters& counters, void* data, std::size_t bytes,
                               int root, std::size_t segment_bytes, int tag)
    : transport_(transport),
      counters_(counters),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      place_((transport.rank() - root + transport.size()) % transport.size()),
      tag_(tag),
      segments_(bytes == 0 ? 0 : SegmentsOf(bytes, segment_bytes)) {
  if (place_ == 0) received_ = segments_;
  if (place_ == transport.size() - 1) sent_ = segments_;
}

bool ChainBroadcast::Step() {
  const int from = (transport_.rank() + transport_.size() - 1) % transport_.size();
  const int to = (transport_.rank() + 1) % transport_.size();
  bool moved = false;
  if (receive_ == kNoTicket && received_ < segments_) {
    const Range segment = Segment(received_);
    receive_ = transport_.Irecv(data_ + segment.first, segment.count, from, tag_);
  }
  if (send_ == kNoTicket && sent_ < received_ && sent_ < segments_) {
    const Range segment = Segment(sent_);
    send_ = transport_.Isend(data_ + segment.first, segment.count, to, tag_);
    counters_.network_bytes_sent += segment.count;
    ++counters_.messages_sent;
    moved = true;
  }
  if (receive_ != kNoTicket && transport_.Test(receive_)) {
    counters_.network_bytes_received += Segment(received_).count;
    receive_ = kNoTicket;
    ++received_;
    moved = true;
  }
  if (send_ != kNoTicket && transport_.Test(send_)) {
    send_ = kNoTicket;
    ++sent_;
    moved = true;
  }
  return moved;
}

std::string ChainBroadcast::Waiting() const {
  return received_ < segments_ ? "broadcast segment " + std::to_string(received_ + 1) + " of " +
                                     std::to_string(segments_) + " from the rank before it"
                               : "the next rank to take broadcast segment " + std::to_string(sent_ + 1);
}

}  // namespace hvpipe
