// All-reduce, or reduce to the first rank, among the ranks of one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/dtype.h"
#include "base/telemetry.h"
#include "collectives/collective.h"
#include "collectives/segments.h"
#include "transport/shared_window.h"

namespace hvpipe {

// Sums in rank order. A small array is summed whole by every rank, with one synchronisation per chunk. Of a
// larger one each rank sums a slice and reads the others' (reduce-scatter, all-gather): two synchronisations,
// but less to copy. The result may also stay with the ranks that summed it, each with its slice of the array,
// SplitEvenly by local ranks.
class SharedMemoryReduce : public Collective {
 public:
  enum class Result { kAll, kLeader, kSlices };
  // target[i] = the sum of parts[0][i], parts[1][i], ... of `ranks` ranks, for `count` elements. `target` may
  // be one of the parts if `in` is `out`.
  using Sum =
      std::function<void(void* target, const void* const* parts, std::size_t ranks, std::size_t count)>;

  SharedMemoryReduce(SharedWindow& window, Counters& counters, OperationTag tag, const void* in, void* out,
                     std::size_t count, DType dtype, Sum sum, Result result);
  // `sum` of this constructor: scale * SumInto.
  SharedMemoryReduce(SharedWindow& window, Counters& counters, OperationTag tag, const void* in, void* out,
                     std::size_t count, DType dtype, double scale, Result result);

  bool Step() override;
  bool done() const override;
  std::string Waiting() const override;

 private:
  // What is summed by one rank of a chunk: its elements of the array, and where they are in a slot.
  struct Slice {
    Range of;
    std::size_t at = 0;  // elements
  };
  Range Chunk(std::uint64_t chunk) const;
  void Begin();
  bool Write();
  bool Reduce();
  bool Read();
  void CheckSameOperation(std::uint64_t chunk) const;
  void SumChunk(void* target, std::uint64_t chunk, Range range, const char* own) const;
  Slice SliceOf(std::uint64_t chunk, int owner) const;
  void CopySlices(char* slot, std::uint64_t chunk, int first, int after) const;
  void WriteHeader(std::uint64_t slot, std::size_t bytes);
  bool slices() const { return result_ == Result::kSlices; }
  bool WantsResult() const {
    return result_ == Result::kAll || (result_ == Result::kLeader && shared_.rank() == 0);
  }
  bool SumsWhole() const;

  SharedWindow& shared_;
  Counters& counters_;
  OperationTag tag_;
  const char* in_;
  char* out_;
  std::size_t count_;
  std::size_t element_;  // bytes
  Sum sum_;
  Result result_;
  bool begun_ = false;
  std::size_t per_rank_ = 0;  // elements of a slot for each rank
  std::uint64_t chunks_ = 0;
  std::uint64_t base_ = 0;
  std::uint64_t written_ = 0, reduced_ = 0, read_ = 0;
};

}  // namespace hvpipe
