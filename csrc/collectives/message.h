// Sends one array from one rank to another, in segments below MPI's eager limit.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/segments.h"
#include "transport/transport.h"

namespace hvpipe {

// Both ends cut the message in the same way. Its segments share a tag, so they arrive in order.
struct MessageOptions {
  int peer = 0;
  int tag = 0;
  std::size_t segment_bytes = 60'000;
  int segments_in_flight = 8;
};

class MessageSend : public Collective {
 public:
  // Does not use the engine's send budget: a message that its receiver does not expect yet must not block
  // others.
  MessageSend(Transport& transport, Counters& counters, const void* data, std::size_t bytes,
              MessageOptions options);
  bool Step() override;
  bool done() const override { return sent_ == segments_; }
  std::string Waiting() const override;
  std::vector<int> Ranks() const override { return {transport_.RankInJob(options_.peer)}; }

 private:
  Transport& transport_;
  Counters& counters_;
  const char* data_;
  std::size_t bytes_;
  MessageOptions options_;
  std::size_t segments_, posted_ = 0, sent_ = 0;
  std::deque<Ticket> tickets_;
};

class MessageReceive : public Collective {
 public:
  MessageReceive(Transport& transport, Counters& counters, void* data, std::size_t bytes,
                 MessageOptions options);
  bool Step() override;
  bool done() const override { return received_ == segments_; }
  std::string Waiting() const override;
  std::vector<int> Ranks() const override { return {transport_.RankInJob(options_.peer)}; }

 private:
  Transport& transport_;
  Counters& counters_;
  char* data_;
  std::size_t bytes_;
  MessageOptions options_;
  std::size_t segments_, posted_ = 0, received_ = 0;
  std::deque<Ticket> tickets_;
};

}  // namespace hvpipe
