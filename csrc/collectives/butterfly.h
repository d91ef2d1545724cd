// All-reduces in which ranks exchange with partners at doubling distances.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/dtype.h"
#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/segments.h"
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
// Threads: as Collective.
class ButterflyAllReduce : public Collective {
 public:
  struct Options {
    std::size_t segment_bytes = 60'000;  // the largest message
    int tag = 0;
  };

  ButterflyAllReduce(Transport& transport, Counters& counters, const void* in, void* out, DType dtype,
                     std::vector<ButterflyStep> steps, Options options);

  bool Step() override;
  bool done() const override { return at_ == steps_.size(); }
  std::string Waiting() const override;
  std::vector<int> Ranks() const override { return {transport_.RankInJob(steps_[at_].peer)}; }

 private:
  Range Segment(Range whole, std::size_t segments, std::size_t index) const;
  std::size_t Segments(Range whole) const;
  void Begin();
  bool Finish();
  char* Incoming(const ButterflyStep& step, const Range& part) const;

  Transport& transport_;
  Counters& counters_;
  const char* mine_;  // what this rank has summed so far: `in`, from the first addition on `out`
  char* const out_;
  const DType dtype_;
  const std::size_t element_;  // bytes
  const std::vector<ButterflyStep> steps_;
  const Options options_;
  std::size_t at_ = 0;  // the step under way
  bool begun_ = false;
  AlignedBuffer scratch_;
  std::vector<Ticket> sends_, receives_;  // of the step
  std::size_t sent_ = 0, received_ = 0;   // of these, done
};

}  // namespace hvpipe
