// All-reduces in which ranks exchange with partners at doubling distances.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/dtype.h"
#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/segments.h"
#include "collectives/send_budget.h"
#include "transport/transport.h"

namespace hvpipe {

// One message to a partner, one from it, or both. `sent` and `received` are elements of the array.
struct ButterflyStep {
  int peer = 0;
  Range sent;
  Range received;
  bool adds = false;  // what comes is added; else it replaces what is there
};

// The steps of `rank` of `ranks` for an array of `count` elements. If `ranks` is no power of two, the first
// ones form pairs: one of a pair hands its array to the other, which takes part, and gets the result at last.
//
// Recursive doubling: every exchange has the whole array; ceil(log2(ranks)) exchanges.
std::vector<ButterflyStep> DoublingSteps(int rank, int ranks, std::size_t count);
// Recursive halving, then doubling: a reduce-scatter and an all-gather, with twice as many exchanges and as
// few bytes as a ring (Rabenseifner, "Optimization of collective reduction operations", 2004).
std::vector<ButterflyStep> HalvingSteps(int rank, int ranks, std::size_t count);

// Sums `in` into `out`, which may be `in`, by one step after the other. Both of a pair add in the order of
// ranks, so all ranks end with the same bits. A half type is added in float32 and rounded at each step.
//
// An array of at most Transport::most_at_once is sent at once. For a larger one, each step waits until the
// partner is at the same step, as in a ring, and its messages count against the send budget.
//
// Threads: as Collective.
class ButterflyAllReduce : public Collective {
 public:
  struct Options {
    std::size_t segment_bytes = 60'000;  // the largest message
    int messages_in_flight = 8;          // in each direction
    int tag = 0;
  };

  ButterflyAllReduce(Transport& transport, SendBudget& budget, Counters& counters, const void* in, void* out,
                     std::size_t count, DType dtype, std::vector<ButterflyStep> steps, Options options);

  bool Step() override;
  bool done() const override { return at_ == steps_.size(); }
  std::string Waiting() const override;
  std::vector<int> Ranks() const override { return {transport_.RankInJob(steps_[at_].peer)}; }

 private:
  // The messages of a step in one direction.
  struct Direction {
    std::size_t segments = 0, posted = 0, done = 0;
    std::deque<Ticket> tickets{};

    void Begin(std::size_t count) { *this = {count}; }
    bool under_way() const { return done < segments; }
  };

  std::size_t SegmentsOfRange(Range whole) const;
  Range Segment(Range whole, std::size_t segments, std::size_t index) const;
  bool adds_in_place() const { return steps_[at_].adds && mine_ == out_; }
  // Whether what comes is added where the same elements are sent from.
  bool overwrites_sent() const {
    return adds_in_place() && steps_[at_].sent.first == steps_[at_].received.first &&
           steps_[at_].sent.count > 0;
  }
  bool budgeted() const { return large_ && !overwrites_sent(); }
  void Begin();
  bool ExchangeSignals();
  bool Receive();
  bool Send();
  void Add(const Range& part, const char* theirs);
  char* Incoming(std::size_t index) const;

  Transport& transport_;
  SendBudget& budget_;
  Counters& counters_;
  const char* mine_;  // what this rank has summed so far: `in`, from the first addition on `out`
  char* const out_;
  const DType dtype_;
  const std::size_t element_;  // bytes
  const std::vector<ButterflyStep> steps_;
  const Options options_;
  const bool large_;
  std::size_t at_ = 0;  // the step under way
  bool begun_ = false;
  Ticket own_signal_ = kNoTicket, their_signal_ = kNoTicket;  // that a rank is at this step
  Direction sends_, receives_;
  AlignedBuffer scratch_;  // a slot for each message in flight, if the array has so many
  std::size_t slot_bytes_ = 0, slots_ = 0;
};

// The same sum, with the same bits, as that of DoublingSteps: of the arrays of all ranks, which it
// overwrites.
void SumAsDoubling(void* out, const std::vector<char*>& arrays, DType dtype, std::size_t count);

}  // namespace hvpipe
