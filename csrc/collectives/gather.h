// Exchange of parts between all ranks of a transport (all-gather, all-to-all), and broadcast.
#pragma once

#include <deque>
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

// Sends `bytes` from root to all ranks, in segments. Few of them go down a binomial tree, in as many rounds
// as the logarithm of the ranks. Many go along a chain of ranks, so that all links work at the same time.
class Broadcast : public Collective {
 public:
  // Of `message`, the tag and the segments count.
  Broadcast(Transport& transport, Counters& counters, void* data, std::size_t bytes, int root,
            const MessageOptions& message);
  bool Step() override;
  bool done() const override;
  std::string Waiting() const override;
  std::vector<int> Ranks() const override;

 private:
  struct Child {
    int rank;
    std::size_t posted = 0, sent = 0;
    std::deque<Ticket> tickets{};
  };
  void AddChild(int place);
  Range Segment(std::size_t index) const { return SplitEvenly(bytes_, segments_, index); }
  bool Receive();
  bool Send(Child& child);
  const Child* Late() const;

  Transport& transport_;
  Counters& counters_;
  char* const data_;
  const std::size_t bytes_;
  const int root_;
  const MessageOptions message_;
  const std::size_t segments_;
  int parent_ = -1;  // -1: root
  std::vector<Child> children_;
  std::size_t posted_ = 0, received_ = 0;
  std::deque<Ticket> tickets_;
};

}  // namespace hvpipe
