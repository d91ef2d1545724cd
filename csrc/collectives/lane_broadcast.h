// Broadcast from one rank to the others of its host.
#pragma once

#include <cstddef>
#include <string>

#include "collectives/collective.h"
#include "collectives/lane.h"
#include "core/telemetry.h"

namespace hvpipe {

// Several broadcasts may be under way. Each chunk names its operation, so receivers follow the order that the
// sender chose.
class LaneBroadcast : public Collective {
 public:
  LaneBroadcast(Lane& lane, Counters& counters, LaneTag tag, void* data, std::size_t bytes, int root);

  bool Step() override;
  bool done() const override { return finished_; }
  std::string Waiting() const override;
  double GraceS() const override { return lane_.rank() == root_ ? 0 : 1; }

 private:
  bool Send();
  bool Receive();

  Lane& lane_;
  Counters& counters_;
  LaneTag tag_;
  char* data_;
  std::size_t bytes_;
  int root_;
  std::size_t moved_ = 0;
  bool finished_ = false;
};

}  // namespace hvpipe
