// All-gather among the ranks of one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/segments.h"
#include "transport/shared_window.h"

namespace hvpipe {

// Each rank has its slice of an array, SplitEvenly by local ranks, and gets the others'.
//
// Several of these, and broadcasts from the first rank, may be under way. The first rank decides whose chunk
// is next. The others read that in its header.
class SharedMemoryGather : public Collective {
 public:
  SharedMemoryGather(SharedWindow& window, Counters& counters, OperationTag tag, void* data,
                     std::size_t count, std::size_t element_bytes);

  bool Step() override;
  bool done() const override { return read_ == chunks_; }
  std::string Waiting() const override;
  double GraceS() const override { return shared_.rank() == 0 ? 0 : 1; }

 private:
  // The part of a rank's slice in a chunk, in elements of the array.
  Range Part(int rank, std::uint64_t chunk) const;
  bool IsNext(std::uint64_t at) const;
  bool Write();
  bool Read();

  SharedWindow& shared_;
  Counters& counters_;
  const OperationTag tag_;
  char* const data_;
  const std::size_t count_;
  const std::size_t element_;  // bytes
  const std::uint64_t chunks_;
  std::uint64_t written_ = 0, read_ = 0;
};

}  // namespace hvpipe
