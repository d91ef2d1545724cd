// Ring all-reduce or all-gather over a transport, cut into segments that stay below MPI's eager limit.
#pragma once

#include <deque>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/dtype.h"
#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/segments.h"
#include "collectives/send_budget.h"
#include "transport/transport.h"

namespace hvpipe {

// Reduce-scatter, then all-gather, each in size - 1 steps around the ring, from `in` to `out`, which may be
// `in` (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
// The ranks that a chunk passes sum it in one fixed order, so all ranks end with the same bits. A half type
// is added in float32 and rounded to the wire type at each hop.
//
// Ranks reach a bucket at different times. Each rank signals its left neighbour when it is ready, and a rank
// sends data only after this signal. Otherwise a rank that is ahead would spend its sends in flight on
// buckets that its neighbour has not reached, and the link would idle although both have other buckets to
// exchange. Small all-reduces need no signal: they send at once and do not count against the send budget.
class RingAllReduce : public Collective {
 public:
  struct Options {
    std::size_t segment_bytes = 60'000;  // the largest message; EngineOptions has the job's
    int receives_in_flight = 8;
    int tag = 0;
    // Leave out the reduce-scatter: chunk r, one of `size` equal chunks, is complete on rank r already.
    bool only_gather = false;
  };

  RingAllReduce(Transport& transport, SendBudget& budget, Counters& counters, const void* in, void* out,
                std::size_t count, DType dtype, Options options);

  bool Step() override;
  bool done() const override { return received_ == total_ && sent_ == total_ && own_signal_ == kNoTicket; }
  std::string Waiting() const override;

 private:
  struct Receive {
    Ticket ticket;
    std::size_t index;
    void* scratch;  // null if it receives to `out`
  };
  Range Segment(std::size_t index, bool incoming) const;
  bool Reducing(std::size_t index) const { return !options_.only_gather && index < steps_ / 2 * segments_; }
  int left() const { return (transport_.rank() + transport_.size() - 1) % transport_.size(); }
  int right() const { return (transport_.rank() + 1) % transport_.size(); }
  bool ExchangeSignals();
  bool PostReceives();
  void* TakeScratch();
  bool FinishReceives();
  bool PostSends();
  bool FinishSends();

  Transport& transport_;
  SendBudget& budget_;
  Counters& counters_;
  const char* in_;
  char* out_;
  std::size_t count_;
  DType dtype_;
  Options options_;
  std::size_t ranks_;
  std::size_t steps_;     // 2 (ranks - 1), or half of them for an all-gather
  std::size_t segments_;  // of the largest chunk
  std::size_t total_;     // steps * segments
  std::size_t posted_receives_ = 0, received_ = 0, posted_sends_ = 0, sent_ = 0;
  std::deque<Receive> receives_;
  std::deque<Ticket> sends_;
  bool signalled_ = false;
  Ticket own_signal_ = kNoTicket;    // to the left neighbour
  Ticket their_signal_ = kNoTicket;  // from the right neighbour
  bool small_;                       // each step is one small message
  std::size_t scratch_bytes_;
  std::vector<AlignedBuffer> scratch_;
  std::vector<void*> free_scratch_;
};

}  // namespace hvpipe
