// All-gather and broadcast of bytes over a transport. Not used within a training step.
#pragma once

#include <string>
#include <vector>

#include "collectives/collective.h"
#include "collectives/segments.h"
#include "collectives/transport.h"
#include "core/telemetry.h"

namespace hvpipe {

// Sends `bytes` of every rank to every rank, in size - 1 steps around a ring.
class RingAllGather : public Collective {
 public:
  // `out` has size * `bytes` bytes; this rank's own data must be in its place already.
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

// Sends `bytes` from root along a chain of ranks, in segments, so that all links work at the same time.
class ChainBroadcast : public Collective {
 public:
  ChainBroadcast(Transport& transport, Counters& counters, void* data, std::size_t bytes, int root,
                 std::size_t segment_bytes, int tag);
  bool Step() override;
  bool done() const override { return received_ == segments_ && sent_ == segments_; }
  std::string Waiting() const override;

 private:
  Range Segment(std::size_t index) const { return SplitEvenly(bytes_, segments_, index); }

  Transport& transport_;
  Counters& counters_;
  char* data_;
  std::size_t bytes_;
  int place_;  // in the chain; 0: root
  int tag_;
  std::size_t segments_, received_ = 0, sent_ = 0;
  Ticket receive_ = kNoTicket, send_ = kNoTicket;
};

}  // namespace hvpipe
