// Ring all-reduce over a transport, cut into segments that stay below MPI's eager limit.
#pragma once

#include <deque>
#include <vector>

#include "collectives/collective.h"
#include "collectives/transport.h"

namespace hvpipe {

// Reduce-scatter, then all-gather, each in size - 1 steps around the ring, in place (Patarasuk and Yuan,
// "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Every chunk is summed in
// one fixed order by the ranks it passes, so all ranks end with the same bits. A half type is added in
// float32 and rounded to the wire type at each hop.
//
// Ranks reach a bucket at different times. A rank says to the one before it that it has come, and data wait
// for that word: or else the sends in flight of a rank that is ahead would all be of buckets that its
// neighbour has not got to, and the link would rest while both have others to exchange. Not where all of it
// is little: that goes at once, and counts for nothing among the sends in flight.
class RingAllReduce : public Collective {
 public:
  struct Options {
    std::size_t segment_bytes = 60'000;  // the most that a message has
    int receives_in_flight = 8;
    int tag = 0;
  };

  RingAllReduce(Transport& transport, SendBudget& budget, Counters& counters, void* buffer, std::size_t count,
                DType dtype, Options options);

  bool Step() override;
  bool done() const override { return received_ == total_ && sent_ == total_ && greeting_ == kNoTicket; }
  std::string Waiting() const override;

 private:
  struct Receive {
    Ticket ticket;
    std::size_t index;
    void* scratch;  // null in the all-gather, which receives in place
  };
  Range Segment(std::size_t index, bool incoming) const;
  bool Reducing(std::size_t index) const { return index < steps_ / 2 * segments_; }
  int left() const { return (transport_.rank() + transport_.size() - 1) % transport_.size(); }
  int right() const { return (transport_.rank() + 1) % transport_.size(); }
  bool Greet();
  bool PostReceives();
  void* TakeScratch();
  bool FinishReceives();
  bool PostSends();
  bool FinishSends();

  Transport& transport_;
  SendBudget& budget_;
  Counters& counters_;
  char* buffer_;
  std::size_t count_;
  DType dtype_;
  Options options_;
  std::size_t ranks_;
  std::size_t steps_;     // 2 (ranks - 1)
  std::size_t segments_;  // of the largest chunk
  std::size_t total_;     // steps * segments
  std::size_t posted_receives_ = 0, received_ = 0, posted_sends_ = 0, sent_ = 0;
  std::deque<Receive> receives_;
  std::deque<Ticket> sends_;
  bool greeted_ = false;
  Ticket greeting_ = kNoTicket, awaited_ = kNoTicket;  // to the rank before, of the rank behind
  bool small_;                                         // each step is one message, and all of them are little
  std::size_t scratch_bytes_;
  std::vector<AlignedBuffer> scratch_;
  std::vector<void*> free_scratch_;
};

}  // namespace hvpipe
