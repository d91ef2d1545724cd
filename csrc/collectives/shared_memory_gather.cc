// Writes this rank's parts to the window, and reads those of the others.
#include "collectives/shared_memory_gather.h"

#include <cstring>
#include <utility>

#include "base/vector_loops.h"

namespace hvpipe {

SharedMemoryGather::SharedMemoryGather(SharedWindow& window, Counters& counters, OperationTag tag, void* data,
                                       std::size_t count, std::size_t element_bytes)
    : shared_(window),
      counters_(counters),
      tag_(std::move(tag)),
      data_(static_cast<char*>(data)),
      count_(count),
      element_(element_bytes),
      chunks_(count == 0 ? 0
                         : SegmentsOf(SplitEvenly(count, static_cast<std::size_t>(window.size()), 0).count,
                                      window.slot_bytes() / element_bytes)) {}

Range SharedMemoryGather::Part(int rank, std::uint64_t chunk) const {
  const Range slice =
      SplitEvenly(count_, static_cast<std::size_t>(shared_.size()), static_cast<std::size_t>(rank));
  const Range part = SplitEvenly(slice.count, chunks_, chunk);
  return {slice.first + part.first, part.count};
}

bool SharedMemoryGather::IsNext(std::uint64_t at) const {
  return shared_.written(0).load(std::memory_order_acquire) > at &&
         shared_.header(0, at).sequence == tag_.sequence;
}

bool SharedMemoryGather::Step() {
  const bool moved = Write();
  return Read() || moved;
}

bool SharedMemoryGather::Write() {
  constexpr std::uint64_t kAhead = 2;  // chunks that are written before the others' are read
  const int me = shared_.rank();
  bool moved = false;
  while (written_ < chunks_ && written_ < read_ + kAhead) {
    const std::uint64_t at = shared_.position;
    if (me == 0 ? at >= shared_.slots() && !shared_.AllRead(at - shared_.slots() + 1) : !IsNext(at)) break;
    const Range part = Part(me, written_);
    if (me == 0) {
      SharedWindow::SlotHeader& header = shared_.header(0, at);
      header.signature = tag_.signature;
      header.sequence = tag_.sequence;
      header.bytes = part.count * element_;
    }
    CopyToPeers(shared_.slot(me, at), data_ + part.first * element_, part.count * element_);
    counters_.shared_memory_bytes += part.count * element_;
    ++written_;
    ++shared_.position;
    shared_.written(me).store(at + 1, std::memory_order_release);
    moved = true;
  }
  return moved;
}

bool SharedMemoryGather::Read() {
  const int me = shared_.rank();
  bool moved = false;
  while (read_ < written_) {
    const std::uint64_t at = shared_.read(me).load(std::memory_order_relaxed);
    if (!IsNext(at) || !shared_.AllWritten(at + 1)) break;
    for (int rank = 0; rank < shared_.size(); ++rank) {
      const Range part = Part(rank, read_);
      if (rank != me) Copy(data_ + part.first * element_, shared_.slot(rank, at), part.count * element_);
    }
    ++read_;
    shared_.reduced(me).store(at + 1, std::memory_order_release);
    shared_.read(me).store(at + 1, std::memory_order_release);
    moved = true;
  }
  return moved;
}

std::string SharedMemoryGather::Waiting() const {
  const std::string chunk = "chunk " + std::to_string(read_ + 1) + " of " + std::to_string(chunks_);
  std::string late;
  for (int rank = 0; rank < shared_.size(); ++rank) {
    const auto written = shared_.written(rank).load(std::memory_order_acquire);
    if (written <= shared_.read(shared_.rank()).load(std::memory_order_relaxed))
      late += " " + std::to_string(rank);
  }
  return chunk + " of the gather from local rank" + (late.empty() ? "s" : late);
}

}  // namespace hvpipe
