// Both ends keep several segments in flight. Receives are posted before the data arrives.
#include "collectives/message.h"

namespace hvpipe {
namespace {

std::string Position(std::size_t segment, std::size_t segments) {
  return "segment " + std::to_string(segment + 1) + " of " + std::to_string(segments);
}

}  // namespace

MessageSend::MessageSend(Transport& transport, Counters& counters, const void* data, std::size_t bytes,
                         MessageOptions options)
    : transport_(transport),
      counters_(counters),
      data_(static_cast<const char*>(data)),
      bytes_(bytes),
      options_(options),
      segments_(SegmentsOf(bytes, options.segment_bytes)) {}

bool MessageSend::Step() {
  bool moved = false;
  while (!tickets_.empty() && transport_.Test(tickets_.front())) {
    tickets_.pop_front();
    ++sent_;
    moved = true;
  }
  while (posted_ < segments_ && tickets_.size() < static_cast<std::size_t>(options_.segments_in_flight)) {
    const Range segment = SplitEvenly(bytes_, segments_, posted_);
    tickets_.push_back(transport_.Isend(data_ + segment.first, segment.count, options_.peer, options_.tag));
    counters_.network_bytes_sent += segment.count;
    ++counters_.messages_sent;
    ++posted_;
    moved = true;
  }
  return moved;
}

std::string MessageSend::Waiting() const {
  return "rank " + std::to_string(transport_.RankInJob(options_.peer)) + " to take " +
         Position(sent_, segments_);
}

MessageReceive::MessageReceive(Transport& transport, Counters& counters, void* data, std::size_t bytes,
                               MessageOptions options)
    : transport_(transport),
      counters_(counters),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      options_(options),
      segments_(SegmentsOf(bytes, options.segment_bytes)) {}

bool MessageReceive::Step() {
  bool moved = false;
  while (!tickets_.empty() && transport_.Test(tickets_.front())) {
    tickets_.pop_front();
    counters_.network_bytes_received += SplitEvenly(bytes_, segments_, received_).count;
    ++received_;
    moved = true;
  }
  while (posted_ < segments_ && tickets_.size() < static_cast<std::size_t>(options_.segments_in_flight)) {
    const Range segment = SplitEvenly(bytes_, segments_, posted_);
    tickets_.push_back(transport_.Irecv(data_ + segment.first, segment.count, options_.peer, options_.tag));
    ++posted_;
    moved = true;
  }
  return moved;
}

std::string MessageReceive::Waiting() const {
  return Position(received_, segments_) + " from rank " + std::to_string(transport_.RankInJob(options_.peer));
}

}  // namespace hvpipe
