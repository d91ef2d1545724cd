// Finds the counters and slots of the shared window.
#include "transport/shared_window.h"

#include <new>
#include <utility>

namespace hvpipe {
namespace {

// Each rank's section of the window holds three counters, then the slot headers, then the slots. Each counter
// and header has lines of its own, so that ranks polling one do not slow down the owner of another.
constexpr std::size_t kLine = 128;  // two cache lines: adjacent-line prefetch pairs them
constexpr std::size_t kCounters = 3;

// Slots begin in the middle of a page, because user arrays and fused buffers begin near the start of one. A
// load waits for a recent store if the lower 12 bits of both addresses are equal.
std::size_t HeadBytes(std::size_t slots) {
  constexpr std::size_t kPage = 4096;
  return ((kCounters + slots) * kLine + kPage - 1) / kPage * kPage + kPage / 2;
}

}  // namespace

static_assert(sizeof(SharedWindow::SlotHeader) <= kLine);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "ranks share these counters between processes");

// Whole pages, so that every rank's section is aligned wherever it is.
std::size_t SharedWindow::Bytes(const Options& options) {
  return (HeadBytes(options.slots) + options.slots * options.slot_bytes + 4095) / 4096 * 4096;
}

SharedWindow::SharedWindow(std::unique_ptr<HostMemory> memory, Options options)
    : options_(options), memory_(std::move(memory)) {
  for (std::size_t i = 0; i < kCounters; ++i)
    new (memory_->section(rank()) + i * kLine) std::atomic<std::uint64_t>(0);
}

std::atomic<std::uint64_t>& SharedWindow::Counter(int rank, int which) const {
  char* address = memory_->section(rank) + static_cast<std::size_t>(which) * kLine;
  return *std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(address));
}

SharedWindow::SlotHeader& SharedWindow::header(int rank, std::uint64_t chunk) const {
  char* address = memory_->section(rank) + (kCounters + chunk % options_.slots) * kLine;
  return *reinterpret_cast<SlotHeader*>(address);
}

char* SharedWindow::slot(int rank, std::uint64_t chunk) const {
  return memory_->section(rank) + HeadBytes(options_.slots) + chunk % options_.slots * options_.slot_bytes;
}

bool SharedWindow::AllWritten(std::uint64_t chunks) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (written(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

bool SharedWindow::AllReduced(std::uint64_t chunks) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (reduced(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

bool SharedWindow::AllRead(std::uint64_t chunks) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (read(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

}  // namespace hvpipe
