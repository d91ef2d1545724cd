// All-gather around a ring and broadcast along a chain: initial weights, metrics, objects.
#include "collectives/gather.h"

namespace hvpipe {

RingAllGather::RingAllGather(Transport& transport, Counters& counters, void* out, std::size_t bytes,
                             std::size_t segment_bytes, int tag)
    : transport_(transport),
      counters_(counters),
      out_(static_cast<char*>(out)),
      bytes_(bytes),
      tag_(tag),
      segments_(SegmentsOf(bytes, segment_bytes)),
      total_(bytes == 0 ? 0 : segments_ * static_cast<std::size_t>(transport.size() - 1)) {}

Range RingAllGather::Segment(std::size_t index, int shift) const {
  const auto ranks = static_cast<std::size_t>(transport_.size());
  const std::size_t step = index / segments_ + static_cast<std::size_t>(shift);
  const std::size_t owner = (static_cast<std::size_t>(transport_.rank()) + 2 * ranks - step) % ranks;
  const Range segment = SplitEvenly(bytes_, segments_, index % segments_);
  return {owner * bytes_ + segment.first, segment.count};
}

bool RingAllGather::Step() {
  const int left = (transport_.rank() + transport_.size() - 1) % transport_.size();
  const int right = (transport_.rank() + 1) % transport_.size();
  bool moved = false;
  if (receive_ == kNoTicket && received_ < total_) {
    const Range segment = Segment(received_, 1);
    receive_ = transport_.Irecv(out_ + segment.first, segment.count, left, tag_);
  }
  if (send_ == kNoTicket && sent_ < total_ && (sent_ < segments_ || sent_ - segments_ < received_)) {
    const Range segment = Segment(sent_, 0);
    send_ = transport_.Isend(out_ + segment.first, segment.count, right, tag_);
    counters_.network_bytes_sent += segment.count;
    ++counters_.messages_sent;
    moved = true;
  }
  if (receive_ != kNoTicket && transport_.Test(receive_)) {
    counters_.network_bytes_received += Segment(received_, 1).count;
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

std::string RingAllGather::Waiting() const {
  return "all-gather segment " + std::to_string(received_ + 1) + " of " + std::to_string(total_) +
         " from rank " +
         std::to_string(
             transport_.RankInJob((transport_.rank() + transport_.size() - 1) % transport_.size()));
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
