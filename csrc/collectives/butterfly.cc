// Finds the partners of a rank, and exchanges with one after the other.
#include "collectives/butterfly.h"

#include <algorithm>
#include <utility>

#include "base/vector_loops.h"

namespace hvpipe {
namespace {

int LargestPower(int ranks) {
  int power = 1;
  while (power * 2 <= ranks) power *= 2;
  return power;
}

// The ranks that exchange: all others hand their array to the rank before them.
struct Places {
  int power;  // ranks that exchange
  int extra;  // pairs at the beginning

  explicit Places(int ranks) : power(LargestPower(ranks)), extra(ranks - power) {}
  bool HandsOver(int rank) const { return rank < 2 * extra && rank % 2 == 1; }
  bool Takes(int rank) const { return rank < 2 * extra && rank % 2 == 0; }
  int PlaceOf(int rank) const { return rank < 2 * extra ? rank / 2 : rank - extra; }
  int RankAt(int place) const { return place < extra ? 2 * place : place + extra; }
};

// Puts the steps of a power of two ranks between those of the pairs.
template <typename Between>
std::vector<ButterflyStep> WithPairs(int rank, int ranks, std::size_t count, const Between& between) {
  const Places places(ranks);
  const Range whole{0, count}, nothing{};
  if (places.HandsOver(rank)) return {{rank - 1, whole, nothing, false}, {rank - 1, nothing, whole, false}};
  std::vector<ButterflyStep> steps;
  if (places.Takes(rank)) steps.push_back({rank + 1, nothing, whole, true});
  between(places, steps);
  if (places.Takes(rank)) steps.push_back({rank + 1, whole, nothing, false});
  return steps;
}

}  // namespace

std::vector<ButterflyStep> DoublingSteps(int rank, int ranks, std::size_t count) {
  return WithPairs(rank, ranks, count, [&](const Places& places, std::vector<ButterflyStep>& steps) {
    const Range whole{0, count};
    for (int distance = 1; distance < places.power; distance *= 2)
      steps.push_back({places.RankAt(places.PlaceOf(rank) ^ distance), whole, whole, true});
  });
}

std::vector<ButterflyStep> HalvingSteps(int rank, int ranks, std::size_t count) {
  return WithPairs(rank, ranks, count, [&](const Places& places, std::vector<ButterflyStep>& steps) {
    const int place = places.PlaceOf(rank);
    Range mine{0, count};
    std::vector<ButterflyStep> back;
    for (int distance = places.power / 2; distance > 0; distance /= 2) {
      const std::size_t half = mine.count / 2;
      const Range lower{mine.first, half}, upper{mine.first + half, mine.count - half};
      const bool keeps_lower = (place & distance) == 0;
      const int peer = places.RankAt(place ^ distance);
      const Range sent = keeps_lower ? upper : lower;
      mine = keeps_lower ? lower : upper;
      steps.push_back({peer, sent, mine, true});
      back.push_back({peer, mine, sent, false});
    }
    steps.insert(steps.end(), back.rbegin(), back.rend());
  });
}

ButterflyAllReduce::ButterflyAllReduce(Transport& transport, Counters& counters, const void* in, void* out,
                                       DType dtype, std::vector<ButterflyStep> steps, Options options)
    : transport_(transport),
      counters_(counters),
      mine_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      dtype_(dtype),
      element_(SizeOf(dtype)),
      steps_(std::move(steps)),
      options_(options) {
  std::size_t most = 0;
  bool free = in != out;  // `out` takes what comes first
  for (const ButterflyStep& step : steps_) {
    if (step.adds && !std::exchange(free, false)) most = std::max(most, step.received.count);
  }
  if (most > 0) scratch_ = AlignedBuffer(most * element_);
}

std::size_t ButterflyAllReduce::Segments(Range whole) const {
  return whole.count == 0 ? 0
                          : SegmentsOf(whole.count * element_, options_.segment_bytes / element_ * element_);
}

Range ButterflyAllReduce::Segment(Range whole, std::size_t segments, std::size_t index) const {
  const Range part = SplitEvenly(whole.count, segments, index);
  return {whole.first + part.first, part.count};
}

bool ButterflyAllReduce::Step() {
  bool moved = false;
  while (!done()) {
    if (!begun_) {
      Begin();
      moved = true;
    }
    moved |= Finish();
    if (sent_ < sends_.size() || received_ < receives_.size()) return moved;
    if (steps_[at_].adds) mine_ = out_;
    ++at_;
    begun_ = false;
  }
  return moved;
}

// Where a part that comes is kept until it is added, or for good.
char* ButterflyAllReduce::Incoming(const ButterflyStep& step, const Range& part) const {
  if (!step.adds || mine_ != out_) return out_ + part.first * element_;
  return static_cast<char*>(scratch_.data()) + (part.first - step.received.first) * element_;
}

void ButterflyAllReduce::Begin() {
  const ButterflyStep& step = steps_[at_];
  begun_ = true;
  sent_ = received_ = 0;
  sends_.clear();
  receives_.clear();
  const std::size_t incoming = Segments(step.received), outgoing = Segments(step.sent);
  for (std::size_t i = 0; i < incoming; ++i) {
    const Range part = Segment(step.received, incoming, i);
    receives_.push_back(
        transport_.Irecv(Incoming(step, part), part.count * element_, step.peer, options_.tag));
  }
  for (std::size_t i = 0; i < outgoing; ++i) {
    const Range part = Segment(step.sent, outgoing, i);
    sends_.push_back(
        transport_.Isend(mine_ + part.first * element_, part.count * element_, step.peer, options_.tag));
    counters_.network_bytes_sent += part.count * element_;
    ++counters_.messages_sent;
  }
}

// What is sent must not change before it has left.
bool ButterflyAllReduce::Finish() {
  const ButterflyStep& step = steps_[at_];
  bool moved = false;
  while (sent_ < sends_.size() && transport_.Test(sends_[sent_])) {
    ++sent_;
    moved = true;
  }
  const bool waits =
      step.adds && mine_ == out_ && step.sent.first == step.received.first && sent_ < sends_.size();
  while (!waits && received_ < receives_.size() && transport_.Test(receives_[received_])) {
    const Range part = Segment(step.received, receives_.size(), received_);
    counters_.network_bytes_received += part.count * element_;
    if (step.adds) {
      const char* const mine = mine_ + part.first * element_;
      const char* const theirs = Incoming(step, part);
      const bool first = transport_.rank() < step.peer;
      const void* const parts[] = {first ? mine : theirs, first ? theirs : mine};
      SumInto(out_ + part.first * element_, parts, 2, dtype_, part.count);
    }
    ++received_;
    moved = true;
  }
  return moved;
}

std::string ButterflyAllReduce::Waiting() const {
  const int peer = steps_[at_].peer;
  const std::string rank = "rank " + std::to_string(transport_.RankInJob(peer));
  const std::string step = "step " + std::to_string(at_ + 1) + " of " + std::to_string(steps_.size());
  if (received_ == receives_.size()) return rank + " to take " + step + " of this all-reduce";
  const Places places(transport_.size());
  // A rank that takes the array of another one first may itself wait.
  const bool sends_first = !places.Takes(peer) || places.HandsOver(transport_.rank());
  if (at_ == 0 && received_ == 0 && sends_first) return rank + " to reach this all-reduce";
  return rank + " to send " + step + " of this all-reduce";
}

}  // namespace hvpipe
