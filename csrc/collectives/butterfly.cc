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

void SumAsDoubling(void* out, const std::vector<char*>& arrays, DType dtype, std::size_t count) {
  const Places places(static_cast<int>(arrays.size()));
  const auto add = [&](int to, int from, void* target) {
    const void* const parts[] = {arrays[static_cast<std::size_t>(to)],
                                 arrays[static_cast<std::size_t>(from)]};
    SumInto(target, parts, 2, dtype, count);
  };
  for (int pair = 0; pair < places.extra; ++pair) add(2 * pair, 2 * pair + 1, arrays[2u * pair]);
  for (int distance = 1; distance < places.power; distance *= 2) {
    for (int place = 0; place < places.power; place += 2 * distance) {
      const int to = places.RankAt(place);
      const bool last = 2 * distance == places.power;
      add(to, places.RankAt(place + distance), last ? out : arrays[static_cast<std::size_t>(to)]);
    }
  }
}

ButterflyAllReduce::ButterflyAllReduce(Transport& transport, SendBudget& budget, Counters& counters,
                                       const void* in, void* out, std::size_t count, DType dtype,
                                       std::vector<ButterflyStep> steps, Options options)
    : transport_(transport),
      budget_(budget),
      counters_(counters),
      mine_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      dtype_(dtype),
      element_(SizeOf(dtype)),
      steps_(std::move(steps)),
      options_(options),
      large_(count * element_ > transport.most_at_once()) {
  bool free = in != out;  // `out` takes what comes first
  for (const ButterflyStep& step : steps_) {
    if (!step.adds || step.received.count == 0 || std::exchange(free, false)) continue;
    const std::size_t segments = SegmentsOfRange(step.received);
    slot_bytes_ = std::max(slot_bytes_, Segment(step.received, segments, 0).count * element_);
    slots_ = std::max(slots_, std::min(segments, static_cast<std::size_t>(options_.messages_in_flight)));
  }
  if (slots_ > 0) scratch_ = AlignedBuffer(slots_ * slot_bytes_);
}

std::size_t ButterflyAllReduce::SegmentsOfRange(Range whole) const {
  const std::size_t bytes = whole.count * element_;
  const std::size_t most = SegmentBytes(bytes, options_.segment_bytes) / element_ * element_;
  return whole.count == 0 ? 0 : SegmentsOf(bytes, std::max(most, element_));
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
    moved |= ExchangeSignals();
    moved |= Send();
    moved |= Receive();
    if (sends_.under_way() || receives_.under_way() || own_signal_ != kNoTicket) return moved;
    if (steps_[at_].adds) mine_ = out_;
    ++at_;
    begun_ = false;
  }
  return moved;
}

void ButterflyAllReduce::Begin() {
  const ButterflyStep& step = steps_[at_];
  begun_ = true;
  sends_.Begin(SegmentsOfRange(step.sent));
  receives_.Begin(SegmentsOfRange(step.received));
  if (!large_) return;
  if (sends_.under_way()) their_signal_ = transport_.Irecv(nullptr, 0, step.peer, options_.tag);
  if (receives_.under_way()) own_signal_ = transport_.Isend(nullptr, 0, step.peer, options_.tag);
}

bool ButterflyAllReduce::ExchangeSignals() {
  const bool theirs = transport_.TestAndForget(their_signal_);
  return transport_.TestAndForget(own_signal_) || theirs;
}

// Where a segment that comes is kept until it is added, or for good.
char* ButterflyAllReduce::Incoming(std::size_t index) const {
  if (adds_in_place()) return static_cast<char*>(scratch_.data()) + index % slots_ * slot_bytes_;
  return out_ + Segment(steps_[at_].received, receives_.segments, index).first * element_;
}

bool ButterflyAllReduce::Send() {
  const ButterflyStep& step = steps_[at_];
  bool moved = false;
  while (!sends_.tickets.empty() && transport_.Test(sends_.tickets.front())) {
    sends_.tickets.pop_front();
    ++sends_.done;
    if (budgeted()) budget_.Return();
    moved = true;
  }
  if (their_signal_ != kNoTicket) return moved;
  const auto most = static_cast<std::size_t>(options_.messages_in_flight);
  while (sends_.posted < sends_.segments && sends_.tickets.size() < most &&
         !(budgeted() && budget_.empty())) {
    const Range part = Segment(step.sent, sends_.segments, sends_.posted++);
    const std::size_t bytes = part.count * element_;
    sends_.tickets.push_back(transport_.Isend(mine_ + part.first * element_, bytes, step.peer, options_.tag));
    if (budgeted()) budget_.Take();
    counters_.network_bytes_sent += bytes;
    ++counters_.messages_sent;
    moved = true;
  }
  return moved;
}

bool ButterflyAllReduce::Receive() {
  const ButterflyStep& step = steps_[at_];
  const auto most = static_cast<std::size_t>(options_.messages_in_flight);
  bool moved = false;
  while (receives_.under_way()) {
    while (receives_.posted < receives_.segments && receives_.tickets.size() < most) {
      const std::size_t index = receives_.posted++;
      const Range part = Segment(step.received, receives_.segments, index);
      receives_.tickets.push_back(
          transport_.Irecv(Incoming(index), part.count * element_, step.peer, options_.tag));
    }
    // What is sent must not change before it has left.
    if (overwrites_sent() && sends_.done <= receives_.done) return moved;
    if (!transport_.Test(receives_.tickets.front())) return moved;
    receives_.tickets.pop_front();
    const Range part = Segment(step.received, receives_.segments, receives_.done);
    counters_.network_bytes_received += part.count * element_;
    if (step.adds) Add(part, Incoming(receives_.done));
    ++receives_.done;
    moved = true;
  }
  return moved;
}

void ButterflyAllReduce::Add(const Range& part, const char* theirs) {
  const char* const mine = mine_ + part.first * element_;
  const bool first = transport_.rank() < steps_[at_].peer;
  const void* const parts[] = {first ? mine : theirs, first ? theirs : mine};
  SumInto(out_ + part.first * element_, parts, 2, dtype_, part.count);
}

std::string ButterflyAllReduce::Waiting() const {
  const int peer = steps_[at_].peer;
  const std::string rank = "rank " + std::to_string(transport_.RankInJob(peer));
  const std::string step = "step " + std::to_string(at_ + 1) + " of " + std::to_string(steps_.size());
  const bool receives = receives_.under_way();
  if (!receives && their_signal_ == kNoTicket) return rank + " to take " + step + " of this all-reduce";
  const Places places(transport_.size());
  // A rank that takes the array of another one first may itself wait.
  const bool comes_first = !places.Takes(peer) || places.HandsOver(transport_.rank());
  if (at_ == 0 && receives_.done == 0 && comes_first) return rank + " to reach this all-reduce";
  return rank + (receives ? " to send " : " to reach ") + step + " of this all-reduce";
}

}  // namespace hvpipe
