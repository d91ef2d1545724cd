// Allocates the shared window and finds the counters and slots in it.
#include "collectives/shared_window.h"

#include <cstring>
#include <new>

#include "core/mpi_error.h"

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

SharedWindow::SharedWindow(MPI_Comm local, Options options) : options_(options), local_(local) {
  HVPIPE_MPI(MPI_Comm_set_errhandler(local_, MPI_ERRORS_RETURN));
  HVPIPE_MPI(MPI_Comm_rank(local_, &rank_));
  HVPIPE_MPI(MPI_Comm_size(local_, &size_));
  if (static_cast<std::size_t>(size_) > kMostRanksOfHost) {
    throw Error("A host should have at most " + std::to_string(kMostRanksOfHost) +
                    " ranks. Received: " + std::to_string(size_),
                ErrorKind::kUsage);
  }
  // Whole pages, so that every rank's section is aligned wherever MPI puts it.
  const std::size_t bytes =
      (HeadBytes(options.slots) + options.slots * options.slot_bytes + 4095) / 4096 * 4096;
  MPI_Info info = MPI_INFO_NULL;
  HVPIPE_MPI(MPI_Info_create(&info));
  HVPIPE_MPI(MPI_Info_set(info, "alloc_shared_noncontig", "true"));
  void* mine = nullptr;
  HVPIPE_MPI(MPI_Win_allocate_shared(static_cast<MPI_Aint>(bytes), 1, info, local_, &mine, &window_));
  HVPIPE_MPI(MPI_Info_free(&info));
  std::memset(mine, 0, bytes);
  for (int peer = 0; peer < size_; ++peer) {
    MPI_Aint size = 0;
    int unit = 0;
    void* address = nullptr;
    HVPIPE_MPI(MPI_Win_shared_query(window_, peer, &size, &unit, &address));
    base_.push_back(static_cast<char*>(address));
  }
  for (std::size_t i = 0; i < kCounters; ++i)
    new (base_[static_cast<std::size_t>(rank_)] + i * kLine) std::atomic<std::uint64_t>(0);
  HVPIPE_MPI(MPI_Barrier(local_));
}

void SharedWindow::Free() {
  HVPIPE_MPI(MPI_Win_free(&window_));
  HVPIPE_MPI(MPI_Comm_free(&local_));
}

std::atomic<std::uint64_t>& SharedWindow::Counter(int rank, int which) const {
  char* address = base_[static_cast<std::size_t>(rank)] + static_cast<std::size_t>(which) * kLine;
  return *std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(address));
}

SharedWindow::SlotHeader& SharedWindow::header(int rank, std::uint64_t chunk) const {
  char* address = base_[static_cast<std::size_t>(rank)] + (kCounters + chunk % options_.slots) * kLine;
  return *reinterpret_cast<SlotHeader*>(address);
}

char* SharedWindow::slot(int rank, std::uint64_t chunk) const {
  return base_[static_cast<std::size_t>(rank)] + HeadBytes(options_.slots) +
         chunk % options_.slots * options_.slot_bytes;
}

bool SharedWindow::AllWritten(std::uint64_t chunks) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (written(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

bool SharedWindow::AllReduced(std::uint64_t chunks) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (reduced(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

bool SharedWindow::AllRead(std::uint64_t chunks) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (read(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

}  // namespace hvpipe
