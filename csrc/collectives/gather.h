// Exchange of parts between all ranks of a transport (all-gather, all-to-all), and broadcast.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/message.h"
#include "collectives/segments.h"
#include "transport/transport.h"

namespace hvpipe {

// What goes to a peer, and what comes from one.
struct SentPart {
  int peer;
  const void* data;
  std::size_t bytes;
};
struct ReceivedPart {
  int peer;
  void* data;
  std::size_t bytes;
};

// Sends and receives all parts side by side, each straight to its peer. Both ends know the size of a part: an
// empty one is no message. At most one part goes from one rank to another. `message` has the tag.
std::unique_ptr<Collective> MakeExchange(Transport& transport, Counters& counters,
                                         const std::vector<SentPart>& sends,
                                         const std::vector<ReceivedPart>& receives, MessageOptions message);

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
