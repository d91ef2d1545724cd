// Broadcast from one rank to the others of its host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/telemetry.h"
#include "collectives/collective.h"
#include "transport/shared_window.h"

namespace hvpipe {

// Several broadcasts may be under way. Each chunk names its operation, so receivers follow the order that the
// sender chose.
class SharedMemoryBroadcast : public Collective {
 public:
  SharedMemoryBroadcast(SharedWindow& window, Counters& counters, OperationTag tag, void* data,
                        std::size_t bytes, int root);

  bool Step() override;
  bool done() const override { return finished_; }
  std::string Waiting() const override;
  double GraceS() const override { return shared_.rank() == root_ ? 0 : 1; }

 private:
  bool HasRead(std::uint64_t chunks) const;
  bool Send();
  bool Receive();

  SharedWindow& shared_;
  Counters& counters_;
  OperationTag tag_;
  char* data_;
  std::size_t bytes_;
  int root_;
  std::size_t moved_ = 0;
  bool finished_ = false;
};

}  // namespace hvpipe
