// Ring all-gather and pipelined broadcast of plain bytes over a transport.
#pragma once

#include <string>
#include <vector>

#include "collectives/collective.h"
#include "collectives/transport.h"

namespace hvpipe {

// `bytes` from every rank to every rank: size - 1 steps around a ring, in segments.
class RingAllGather : public Collective {
 public:
  // `out` holds size * bytes, with this rank's part already in its place.
  RingAllGather(Transport& transport, Counters& counters, void* out, std::size_t bytes,
                std::size_t segment_bytes, int tag);
  bool Step() override;
  bool done() const override { return received_ == total_ && sent_ == total_; }
  std::string Waiting() const override;

 private:
  Range Segment(std::size_t index, int shift) const;

  Transport& transport_;
  Counters& counters_;
  char* out_;
  std::size_t bytes_;
  int tag_;
  std::size_t segments_, total_;
  std::size_t received_ = 0, sent_ = 0;
  Ticket receive_ = kNoTicket, send_ = kNoTicket;
};

// `bytes` from root along a chain of ranks, in segments, so that all links work at once.
class ChainBroadcast : public Collective {
 public:
  ChainBroadcast(Transport& transport, Counters& counters, void* data, std::size_t bytes, int root,
                 std::size_t segment_bytes, int tag);
  bool Step() override;
  bool done() const override { return received_ == segments_ && sent_ == segments_; }
  std::string Waiting() const override;

 private:
  Range Segment(std::size_t index) const { return PartOf(bytes_, segments_, index); }

  Transport& transport_;
  Counters& counters_;
  char* data_;
  std::size_t bytes_;
  int place_;  // in the chain; 0 is the root
  int tag_;
  std::size_t segments_, received_ = 0, sent_ = 0;
  Ticket receive_ = kNoTicket, send_ = kNoTicket;
};

}  // namespace hvpipe
