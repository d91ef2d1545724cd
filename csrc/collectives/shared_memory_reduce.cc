// Writes chunks to the window, sums them, and reads the result.
#include "collectives/shared_memory_reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/vector_loops.h"
#include "collectives/control.h"

namespace hvpipe {

SharedMemoryReduce::SharedMemoryReduce(SharedWindow& window, Counters& counters, OperationTag tag,
                                       const void* in, void* out, std::size_t count, DType dtype, Sum sum,
                                       Result result)
    : shared_(window),
      counters_(counters),
      tag_(std::move(tag)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      count_(count),
      element_(SizeOf(dtype)),
      sum_(std::move(sum)),
      result_(result) {
  const auto ranks = static_cast<std::size_t>(window.size());
  per_rank_ = window.slot_bytes() / ranks / kAlignment * kAlignment / element_;
  const std::size_t per_chunk = slices() ? per_rank_ : window.slot_bytes() / element_;
  chunks_ = SegmentsOf(slices() ? SplitEvenly(count, ranks, 0).count : count, per_chunk);
}

SharedMemoryReduce::SharedMemoryReduce(SharedWindow& window, Counters& counters, OperationTag tag,
                                       const void* in, void* out, std::size_t count, DType dtype,
                                       double scale, Result result)
    : SharedMemoryReduce(
          window, counters, std::move(tag), in, out, count, dtype,
          [dtype, scale](void* target, const void* const* parts, std::size_t ranks, std::size_t elements) {
            SumInto(target, parts, ranks, dtype, elements);
            Scale(target, dtype, elements, scale);
          },
          result) {}

// The position is known only now, because the operations before this one have ended.
void SharedMemoryReduce::Begin() {
  begun_ = true;
  base_ = shared_.position;
  shared_.position += chunks_;
}

bool SharedMemoryReduce::SumsWhole() const {
  const std::size_t small_bytes = shared_.size() == 2 ? 128u << 10 : 16u << 10;
  return !slices() && count_ * element_ <= small_bytes;
}

// A chunk is a range of the array, cut into slices; or it has a part of each rank's slice of the array.
SharedMemoryReduce::Slice SharedMemoryReduce::SliceOf(std::uint64_t chunk, int owner) const {
  const auto ranks = static_cast<std::size_t>(shared_.size()), place = static_cast<std::size_t>(owner);
  if (slices()) {
    const Range whole = SplitEvenly(count_, ranks, place);
    const Range part = SplitEvenly(whole.count, chunks_, chunk);
    return {{whole.first + part.first, part.count}, place * per_rank_};
  }
  const Range whole = Chunk(chunk);
  const Range part = SplitEvenly(whole.count, ranks, place);
  return {{whole.first + part.first, part.count}, part.first};
}

Range SharedMemoryReduce::Chunk(std::uint64_t chunk) const {
  return SplitEvenly(count_, static_cast<std::size_t>(chunks_), static_cast<std::size_t>(chunk));
}

bool SharedMemoryReduce::done() const { return begun_ && read_ == chunks_; }

bool SharedMemoryReduce::Step() {
  if (!begun_) Begin();
  bool moved = Write();
  moved |= Reduce();
  moved |= Read();
  return moved;
}

void SharedMemoryReduce::WriteHeader(std::uint64_t slot, std::size_t bytes) {
  SharedWindow::SlotHeader& header = shared_.header(shared_.rank(), slot);
  header.signature = tag_.signature;
  header.sequence = tag_.sequence;
  header.bytes = bytes;
  if (written_ > 0) return;
  const std::size_t length = std::min(tag_.what.size(), sizeof header.what - 1);
  std::memcpy(header.what, tag_.what.data(), length);
  header.what[length] = '\0';
}

bool SharedMemoryReduce::Write() {
  // Up to one chunk ahead of the chunk being read: keeps peers busy and still fits in cache.
  constexpr std::uint64_t kAhead = 2;
  bool moved = false;
  while (written_ < chunks_ && written_ < read_ + kAhead) {
    const std::uint64_t at = base_ + written_;
    if (at >= shared_.slots() && !shared_.AllRead(at - shared_.slots() + 1)) break;
    const Range chunk = Chunk(written_);
    WriteHeader(at, chunk.count * element_);
    // No other rank reads the slice that this rank sums itself, so it is not copied.
    char* const slot = shared_.slot(shared_.rank(), at);
    if (SumsWhole()) {
      CopyToPeers(slot, in_ + chunk.first * element_, chunk.count * element_);
    } else {
      CopySlices(slot, written_, 0, shared_.rank());
      CopySlices(slot, written_, shared_.rank() + 1, shared_.size());
    }
    counters_.shared_memory_bytes += chunk.count * element_;
    ++written_;
    shared_.written(shared_.rank()).store(base_ + written_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

// Copy what the ranks from `first` until `after` sum. Slices of one chunk of the array adjoin.
void SharedMemoryReduce::CopySlices(char* slot, std::uint64_t chunk, int first, int after) const {
  if (first >= after) return;
  if (slices()) {
    for (int owner = first; owner < after; ++owner) {
      const Slice slice = SliceOf(chunk, owner);
      CopyToPeers(slot + slice.at * element_, in_ + slice.of.first * element_, slice.of.count * element_);
    }
    return;
  }
  const Slice begin = SliceOf(chunk, first), end = SliceOf(chunk, after - 1);
  const std::size_t count = end.of.first + end.of.count - begin.of.first;
  CopyToPeers(slot + begin.at * element_, in_ + begin.of.first * element_, count * element_);
}

void SharedMemoryReduce::CheckSameOperation(std::uint64_t chunk) const {
  for (int peer = 0; peer < shared_.size(); ++peer) {
    const SharedWindow::SlotHeader& theirs = shared_.header(peer, chunk);
    if (theirs.signature == tag_.signature && theirs.sequence == tag_.sequence) continue;
    throw Disagreement("Local rank", shared_.rank(), tag_.what, peer, theirs.what);
  }
}

// Sum `range` of a chunk over all ranks. This rank's own elements of `range` are at `own`.
void SharedMemoryReduce::SumChunk(void* target, std::uint64_t chunk, Range range, const char* own) const {
  const void* sources[kMostRanksOfHost];
  const auto ranks = static_cast<std::size_t>(shared_.size());
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    sources[peer] = shared_.slot(static_cast<int>(peer), chunk) + range.first * element_;
  }
  sources[static_cast<std::size_t>(shared_.rank())] = own;
  sum_(target, sources, ranks, range.count);
}

bool SharedMemoryReduce::Reduce() {
  if (SumsWhole()) {
    reduced_ = written_;
    return false;
  }
  bool moved = false;
  while (reduced_ < written_) {
    const std::uint64_t at = base_ + reduced_;
    if (!shared_.AllWritten(at + 1)) break;
    if (reduced_ == 0) CheckSameOperation(at);
    const Slice slice = SliceOf(reduced_, shared_.rank());
    const std::size_t place = slice.of.first * element_;
    char* const shared = shared_.slot(shared_.rank(), at) + slice.at * element_;
    if (WantsResult() || slices()) {
      SumChunk(out_ + place, at, {slice.at, slice.of.count}, in_ + place);
      if (!slices()) CopyToPeers(shared, out_ + place, slice.of.count * element_);
    } else {
      SumChunk(shared, at, {slice.at, slice.of.count}, in_ + place);
    }
    ++reduced_;
    shared_.reduced(shared_.rank()).store(base_ + reduced_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

bool SharedMemoryReduce::Read() {
  bool moved = false;
  while (read_ < reduced_) {
    const std::uint64_t at = base_ + read_;
    const Range chunk = Chunk(read_);
    if (SumsWhole()) {
      if (!shared_.AllWritten(at + 1)) break;
      if (read_ == 0) CheckSameOperation(at);
      if (WantsResult()) {
        SumChunk(out_ + chunk.first * element_, at, {0, chunk.count}, shared_.slot(shared_.rank(), at));
      }
      // The sliced form counts reduced chunks, so this form counts them as well: operations may alternate
      // between both.
      shared_.reduced(shared_.rank()).store(at + 1, std::memory_order_release);
    } else {
      if (!slices() && !shared_.AllReduced(at + 1)) break;
      for (int owner = 0; WantsResult() && owner < shared_.size(); ++owner) {
        if (owner == shared_.rank()) continue;  // already in `out`
        const Slice slice = SliceOf(read_, owner);
        Copy(out_ + slice.of.first * element_, shared_.slot(owner, at) + slice.at * element_,
             slice.of.count * element_);
      }
    }
    ++read_;
    shared_.read(shared_.rank()).store(base_ + read_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

std::string SharedMemoryReduce::Waiting() const {
  const auto behind = [this](auto counter, std::uint64_t wanted) {
    std::string ranks;
    for (int peer = 0; peer < shared_.size(); ++peer) {
      if ((shared_.*counter)(peer).load(std::memory_order_acquire) < wanted)
        ranks += " " + std::to_string(peer);
    }
    return ranks;
  };
  const std::string chunk = "chunk " + std::to_string(read_ + 1) + " of " + std::to_string(chunks_);
  const std::uint64_t wanted = base_ + read_ + 1;
  std::string ranks = behind(&SharedWindow::written, wanted);
  if (!ranks.empty()) return chunk + " from local rank" + ranks;
  ranks = behind(&SharedWindow::reduced, wanted);
  if (!ranks.empty()) return "the sum of " + chunk + " from local rank" + ranks;
  // The next chunk can be written once all have read the previous contents of its slot.
  const std::uint64_t next = base_ + written_ + 1;
  return "local rank" + behind(&SharedWindow::read, next - std::min<std::uint64_t>(shared_.slots(), next)) +
         " to read the chunks before";
}

}  // namespace hvpipe
