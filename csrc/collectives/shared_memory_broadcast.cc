// Sends chunks through the slots of one rank.
#include "collectives/shared_memory_broadcast.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/vector_loops.h"

namespace hvpipe {

SharedMemoryBroadcast::SharedMemoryBroadcast(SharedWindow& window, Counters& counters, OperationTag tag,
                                             void* data, std::size_t bytes, int root)
    : shared_(window),
      counters_(counters),
      tag_(std::move(tag)),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      root_(root),
      finished_(bytes == 0) {}

bool SharedMemoryBroadcast::Step() {
  if (finished_) return false;
  return shared_.rank() == root_ ? Send() : Receive();
}

// Whether this rank has read the chunks before: those of a gather are written first.
bool SharedMemoryBroadcast::HasRead(std::uint64_t chunks) const {
  return shared_.read(shared_.rank()).load(std::memory_order_relaxed) == chunks;
}

// Advances all three counters of this rank for every chunk, so that the counters of all ranks stay equal.
bool SharedMemoryBroadcast::Send() {
  bool moved = false;
  while (!finished_) {
    const std::uint64_t at = shared_.position;
    if (!HasRead(at) || (at >= shared_.slots() && !shared_.AllRead(at - shared_.slots() + 1))) break;
    const std::size_t bytes = std::min(shared_.slot_bytes(), bytes_ - moved_);
    SharedWindow::SlotHeader& header = shared_.header(root_, at);
    header.signature = tag_.signature;
    header.sequence = tag_.sequence;
    header.bytes = bytes;
    CopyToPeers(shared_.slot(root_, at), data_ + moved_, bytes);
    counters_.shared_memory_bytes += bytes;
    moved_ += bytes;
    ++shared_.position;
    shared_.written(root_).store(at + 1, std::memory_order_release);
    shared_.reduced(root_).store(at + 1, std::memory_order_release);
    shared_.read(root_).store(at + 1, std::memory_order_release);
    finished_ = moved_ == bytes_;
    moved = true;
  }
  return moved;
}

bool SharedMemoryBroadcast::Receive() {
  bool moved = false;
  while (!finished_) {
    const std::uint64_t at = shared_.position;
    if (shared_.written(root_).load(std::memory_order_acquire) < at + 1) break;
    const SharedWindow::SlotHeader& header = shared_.header(root_, at);
    if (header.sequence != tag_.sequence || !HasRead(at)) break;  // another operation is next
    const std::size_t bytes = static_cast<std::size_t>(header.bytes);
    if (moved_ + bytes > bytes_) throw Error("internal: a broadcast has more bytes than this rank expects");
    Copy(data_ + moved_, shared_.slot(root_, at), bytes);
    moved_ += bytes;
    ++shared_.position;
    const int me = shared_.rank();
    shared_.written(me).store(at + 1, std::memory_order_release);
    shared_.reduced(me).store(at + 1, std::memory_order_release);
    shared_.read(me).store(at + 1, std::memory_order_release);
    finished_ = moved_ == bytes_;
    moved = true;
  }
  return moved;
}

std::string SharedMemoryBroadcast::Waiting() const {
  return "bytes " + std::to_string(moved_) + " to " + std::to_string(bytes_) + " from local rank " +
         std::to_string(root_);
}

}  // namespace hvpipe
