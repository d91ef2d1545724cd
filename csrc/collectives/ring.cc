// The ring all-reduce: which segment goes where, and when.
#include "collectives/ring.h"

#include <algorithm>

#include "base/vector_loops.h"

namespace hvpipe {
// Segment `index` counts through the steps of the ring and, inside a step, through the segments of a chunk:
//
//   step 0            step 1            ...   step size - 1 (all-gather begins)
//   s0 s1 s2 ... sS   s0 s1 s2 ... sS         s0 s1 s2 ... sS
//
// In step k rank r sends chunk r - k and receives chunk r - k - 1. So it sends in step k what it received
// (and summed) in step k - 1: segment `index` may be sent once segment `index - S` was received. An
// all-gather alone is the same in size - 1 steps, without sums.
RingAllReduce::RingAllReduce(Transport& transport, SendBudget& budget, Counters& counters, const void* in,
                             void* out, std::size_t count, DType dtype, Options options)
    : transport_(transport),
      budget_(budget),
      counters_(counters),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      count_(count),
      dtype_(dtype),
      options_(options),
      ranks_(static_cast<std::size_t>(transport.size())),
      steps_((options.only_gather ? 1 : 2) * (ranks_ - 1)) {
  const std::size_t element = SizeOf(dtype);
  const std::size_t largest = SplitEvenly(count, ranks_, 0).count;
  const std::size_t per_segment =
      std::max<std::size_t>(1, SegmentBytes(largest * element, options.segment_bytes) / element);
  segments_ = std::max<std::size_t>(1, (largest + per_segment - 1) / per_segment);
  total_ = steps_ * segments_;
  small_ = segments_ == 1 && count * element <= 4 * kLeastMessageBytes;
  scratch_bytes_ = SplitEvenly(largest, segments_, 0).count * element;
}

Range RingAllReduce::Segment(std::size_t index, bool incoming) const {
  const std::size_t step = index / segments_ + (incoming ? 1 : 0);
  const std::size_t rank = static_cast<std::size_t>(transport_.rank());
  const std::size_t chunk = (rank + 2 * ranks_ - step) % ranks_;
  const Range whole = SplitEvenly(count_, ranks_, chunk);
  const Range part = SplitEvenly(whole.count, segments_, index % segments_);
  return {whole.first + part.first, part.count};
}

bool RingAllReduce::Step() {
  bool moved = ExchangeSignals();
  moved |= PostReceives();
  moved |= FinishReceives();
  moved |= FinishSends();
  moved |= PostSends();
  return moved;
}

// Signals share peer and tag with the data, so MPI keeps them before all data.
bool RingAllReduce::ExchangeSignals() {
  if (!signalled_) {
    signalled_ = true;
    if (small_) return false;
    their_signal_ = transport_.Irecv(nullptr, 0, right(), options_.tag);
    own_signal_ = transport_.Isend(nullptr, 0, left(), options_.tag);
    return true;
  }
  const bool theirs = transport_.TestAndForget(their_signal_);
  return transport_.TestAndForget(own_signal_) || theirs;
}

void* RingAllReduce::TakeScratch() {
  if (free_scratch_.empty()) {
    scratch_.emplace_back(scratch_bytes_);
    return scratch_.back().data();
  }
  void* scratch = free_scratch_.back();
  free_scratch_.pop_back();
  return scratch;
}

// Posts only a few receives until the first segment comes: many operations wait at the same time, and each
// posted receive holds memory.
bool RingAllReduce::PostReceives() {
  constexpr std::size_t kAtFirst = 2;
  const std::size_t window =
      std::min(static_cast<std::size_t>(options_.receives_in_flight), kAtFirst + received_);
  const std::size_t element = SizeOf(dtype_);
  bool moved = false;
  while (posted_receives_ < total_ && receives_.size() < window) {
    const std::size_t index = posted_receives_;
    // A receive in place overwrites what this rank sent size - 1 steps earlier. That send must have ended.
    if (!Reducing(index) && sent_ + (ranks_ - 1) * segments_ <= index) break;
    const Range segment = Segment(index, true);
    void* scratch = Reducing(index) && in_ == out_ ? TakeScratch() : nullptr;
    void* target = scratch != nullptr ? scratch : out_ + segment.first * element;
    const Ticket ticket = segment.count == 0
                              ? kNoTicket
                              : transport_.Irecv(target, segment.count * element, left(), options_.tag);
    receives_.push_back({ticket, index, scratch});
    ++posted_receives_;
    moved = true;
  }
  return moved;
}

bool RingAllReduce::FinishReceives() {
  const std::size_t element = SizeOf(dtype_);
  bool moved = false;
  while (!receives_.empty()) {
    const Receive& receive = receives_.front();
    if (receive.ticket != kNoTicket && !transport_.Test(receive.ticket)) break;
    const Range segment = Segment(receive.index, true);
    if (Reducing(receive.index)) {
      char* const sum = out_ + segment.first * element;
      const void* const parts[] = {in_ + segment.first * element,
                                   receive.scratch != nullptr ? receive.scratch : sum};
      SumInto(sum, parts, 2, dtype_, segment.count);
    }
    counters_.network_bytes_received += segment.count * element;
    if (receive.scratch != nullptr) free_scratch_.push_back(receive.scratch);
    receives_.pop_front();
    ++received_;
    moved = true;
  }
  return moved;
}

bool RingAllReduce::PostSends() {
  if (their_signal_ != kNoTicket) return false;
  const std::size_t element = SizeOf(dtype_);
  bool moved = false;
  while (posted_sends_ < total_ && (small_ || !budget_.empty()) &&
         (posted_sends_ < segments_ || posted_sends_ - segments_ < received_)) {
    const Range segment = Segment(posted_sends_, false);
    Ticket ticket = kNoTicket;
    if (segment.count > 0) {
      const char* const from = posted_sends_ < segments_ ? in_ : out_;
      ticket =
          transport_.Isend(from + segment.first * element, segment.count * element, right(), options_.tag);
      counters_.network_bytes_sent += segment.count * element;
      ++counters_.messages_sent;
    }
    if (!small_) budget_.Take();
    sends_.push_back(ticket);
    ++posted_sends_;
    moved = true;
  }
  return moved;
}

bool RingAllReduce::FinishSends() {
  bool moved = false;
  while (!sends_.empty()) {
    if (sends_.front() != kNoTicket && !transport_.Test(sends_.front())) break;
    if (!small_) budget_.Return();
    sends_.pop_front();
    ++sent_;
    moved = true;
  }
  return moved;
}

std::string RingAllReduce::Waiting() const {
  // Any rank may have caused a missing segment, but a missing signal names the rank that is late.
  if (their_signal_ != kNoTicket)
    return "rank " + std::to_string(transport_.RankInJob(right())) + " to reach this all-reduce";
  if (received_ < total_) {
    return "ring segment " + std::to_string(received_ + 1) + " of " + std::to_string(total_) + " from rank " +
           std::to_string(transport_.RankInJob(left()));
  }
  return "rank " + std::to_string(transport_.RankInJob(right())) + " to take segment " +
         std::to_string(sent_ + 1) + " of " + std::to_string(total_);
}

}  // namespace hvpipe
