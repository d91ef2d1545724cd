// The shared-memory lane: its layout and the collectives that run through it.
#include "collectives/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/check.h"
#include "collectives/control.h"

namespace hvpipe {
namespace {

// A part of a window, from its start: three counters and the slot headers, each on lines of their own so
// that ranks polling one do not slow the owner of another, then the slots.
constexpr std::size_t kLine = 128;  // two cache lines: adjacent-line prefetch pairs them
constexpr std::size_t kCounters = 3;

// Slots begin in the middle of a page. User arrays and fused buffers begin near the start of one, and a load
// whose address equals that of a store shortly before it in the lower 12 bits waits for that store.
std::size_t HeadBytes(std::size_t slots) {
  constexpr std::size_t kPage = 4096;
  return ((kCounters + slots) * kLine + kPage - 1) / kPage * kPage + kPage / 2;
}

constexpr std::size_t kMostRanks = 1024;

}  // namespace

static_assert(sizeof(Lane::SlotHeader) <= kLine);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "ranks share these counters between processes");

Lane::Lane(MPI_Comm local, Options options) : options_(options), local_(local) {
  HVPIPE_MPI(MPI_Comm_set_errhandler(local_, MPI_ERRORS_RETURN));
  HVPIPE_MPI(MPI_Comm_rank(local_, &rank_));
  HVPIPE_MPI(MPI_Comm_size(local_, &size_));
  if (static_cast<std::size_t>(size_) > kMostRanks) {
    throw Error("A host should have at most " + std::to_string(kMostRanks) +
                    " ranks. Received: " + std::to_string(size_),
                ErrorKind::kUsage);
  }
  // Whole pages, so that every rank's part is aligned however MPI lays them out.
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

void Lane::Free() {
  HVPIPE_MPI(MPI_Win_free(&window_));
  HVPIPE_MPI(MPI_Comm_free(&local_));
}

std::atomic<std::uint64_t>& Lane::Counter(int rank, int which) const {
  char* address = base_[static_cast<std::size_t>(rank)] + static_cast<std::size_t>(which) * kLine;
  return *std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(address));
}

Lane::SlotHeader& Lane::header(int rank, std::uint64_t chunk) const {
  char* address = base_[static_cast<std::size_t>(rank)] + (kCounters + chunk % options_.slots) * kLine;
  return *reinterpret_cast<SlotHeader*>(address);
}

char* Lane::slot(int rank, std::uint64_t chunk) const {
  return base_[static_cast<std::size_t>(rank)] + HeadBytes(options_.slots) +
         chunk % options_.slots * options_.slot_bytes;
}

bool Lane::AllWritten(std::uint64_t chunks) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (written(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

bool Lane::AllReduced(std::uint64_t chunks) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (reduced(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

bool Lane::AllRead(std::uint64_t chunks) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (read(peer).load(std::memory_order_acquire) < chunks) return false;
  }
  return true;
}

LaneReduce::LaneReduce(Lane& lane, Counters& counters, LaneTag tag, const void* in, void* out,
                       std::size_t count, DType dtype, double scale, Result result)
    : lane_(lane),
      counters_(counters),
      tag_(std::move(tag)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      count_(count),
      dtype_(dtype),
      scale_(scale),
      result_(result) {
  per_chunk_ = lane.slot_bytes() / SizeOf(dtype);
  chunks_ = std::max<std::uint64_t>(1, (count + per_chunk_ - 1) / per_chunk_);
}

// The lane's position is known only when the operations before this one have ended.
void LaneReduce::Begin() {
  begun_ = true;
  base_ = lane_.position;
  lane_.position += chunks_;
}

// Of a little, every rank sums everything: one synchronisation. Of more, each sums a slice and reads the
// others' (reduce-scatter, all-gather): two synchronisations, but less to copy.
bool LaneReduce::Whole() const {
  const std::size_t small_bytes = lane_.size() == 2 ? 128u << 10 : 16u << 10;
  return count_ * SizeOf(dtype_) <= small_bytes;
}

Range LaneReduce::Slice(std::size_t count, int owner) const {
  return PartOf(count, static_cast<std::size_t>(lane_.size()), static_cast<std::size_t>(owner));
}

Range LaneReduce::Chunk(std::uint64_t chunk) const {
  return PartOf(count_, static_cast<std::size_t>(chunks_), static_cast<std::size_t>(chunk));
}

bool LaneReduce::done() const { return begun_ && read_ == chunks_; }

bool LaneReduce::Step() {
  if (!begun_) Begin();
  bool moved = Write();
  moved |= Reduce();
  moved |= Read();
  return moved;
}

bool LaneReduce::Write() {
  // One chunk ahead of what is being read: enough to keep peers busy, little enough to stay in cache.
  constexpr std::uint64_t kAhead = 2;
  bool moved = false;
  while (written_ < chunks_ && written_ < read_ + kAhead) {
    const std::uint64_t at = base_ + written_;
    if (at >= lane_.slots() && !lane_.AllRead(at - lane_.slots() + 1)) break;
    const Range chunk = Chunk(written_);
    const std::size_t element = SizeOf(dtype_);
    Lane::SlotHeader& header = lane_.header(lane_.rank(), at);
    header.signature = tag_.signature;
    header.sequence = tag_.sequence;
    header.bytes = chunk.count * element;
    if (written_ == 0) {
      const std::size_t length = std::min(tag_.what.size(), sizeof header.what - 1);
      std::memcpy(header.what, tag_.what.data(), length);
      header.what[length] = '\0';
    }
    // A slice that this rank sums itself stays where it is.
    const Range own = Whole() ? Range{chunk.count, 0} : Slice(chunk.count, lane_.rank());
    const std::size_t after = own.first + own.count;
    char* slot = lane_.slot(lane_.rank(), at);
    const char* source = in_ + chunk.first * element;
    CopyToPeers(slot, source, own.first * element);
    CopyToPeers(slot + after * element, source + after * element, (chunk.count - after) * element);
    counters_.shared_memory_bytes += chunk.count * element;
    ++written_;
    lane_.written(lane_.rank()).store(base_ + written_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

void LaneReduce::CheckSameOperation(std::uint64_t chunk) const {
  for (int peer = 0; peer < lane_.size(); ++peer) {
    const Lane::SlotHeader& theirs = lane_.header(peer, chunk);
    if (theirs.signature == tag_.signature && theirs.sequence == tag_.sequence) continue;
    throw Disagreement("Local rank", lane_.rank(), tag_.what, peer, theirs.what);
  }
}

// Sums `part` of a chunk over all slots, this rank's own part being at `own`.
void LaneReduce::SumChunk(void* target, std::uint64_t chunk, Range part, const char* own) const {
  const void* sources[kMostRanks];
  const auto ranks = static_cast<std::size_t>(lane_.size());
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    sources[peer] = lane_.slot(static_cast<int>(peer), chunk) + part.first * SizeOf(dtype_);
  }
  sources[static_cast<std::size_t>(lane_.rank())] = own;
  SumInto(target, sources, ranks, dtype_, part.count);
  Scale(target, dtype_, part.count, scale_);
}

bool LaneReduce::Reduce() {
  if (Whole()) {
    reduced_ = written_;
    return false;
  }
  bool moved = false;
  while (reduced_ < written_) {
    const std::uint64_t at = base_ + reduced_;
    if (!lane_.AllWritten(at + 1)) break;
    if (reduced_ == 0) CheckSameOperation(at);
    const Range chunk = Chunk(reduced_);
    const Range slice = Slice(chunk.count, lane_.rank());
    const std::size_t element = SizeOf(dtype_);
    const std::size_t place = (chunk.first + slice.first) * element;
    char* shared = lane_.slot(lane_.rank(), at) + slice.first * element;
    if (WantsResult()) {
      SumChunk(out_ + place, at, slice, in_ + place);
      CopyToPeers(shared, out_ + place, slice.count * element);
    } else {
      SumChunk(shared, at, slice, in_ + place);
    }
    ++reduced_;
    lane_.reduced(lane_.rank()).store(base_ + reduced_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

bool LaneReduce::Read() {
  const std::size_t element = SizeOf(dtype_);
  bool moved = false;
  while (read_ < reduced_) {
    const std::uint64_t at = base_ + read_;
    const Range chunk = Chunk(read_);
    if (Whole()) {
      if (!lane_.AllWritten(at + 1)) break;
      if (read_ == 0) CheckSameOperation(at);
      if (WantsResult()) {
        SumChunk(out_ + chunk.first * element, at, {0, chunk.count}, lane_.slot(lane_.rank(), at));
      }
      // So that ranks may mix this form and the sliced one from operation to operation.
      lane_.reduced(lane_.rank()).store(at + 1, std::memory_order_release);
    } else {
      if (!lane_.AllReduced(at + 1)) break;
      for (int owner = 0; WantsResult() && owner < lane_.size(); ++owner) {
        if (owner == lane_.rank()) continue;  // it is there already
        const Range slice = Slice(chunk.count, owner);
        Copy(out_ + (chunk.first + slice.first) * element, lane_.slot(owner, at) + slice.first * element,
             slice.count * element);
      }
    }
    ++read_;
    lane_.read(lane_.rank()).store(base_ + read_, std::memory_order_release);
    moved = true;
  }
  return moved;
}

std::string LaneReduce::Waiting() const {
  const auto behind = [this](auto counter, std::uint64_t wanted) {
    std::string ranks;
    for (int peer = 0; peer < lane_.size(); ++peer) {
      if ((lane_.*counter)(peer).load(std::memory_order_acquire) < wanted)
        ranks += " " + std::to_string(peer);
    }
    return ranks;
  };
  const std::string chunk = "chunk " + std::to_string(read_ + 1) + " of " + std::to_string(chunks_);
  const std::uint64_t wanted = base_ + read_ + 1;
  std::string ranks = behind(&Lane::written, wanted);
  if (!ranks.empty()) return chunk + " from local rank" + ranks;
  ranks = behind(&Lane::reduced, wanted);
  if (!ranks.empty()) return "the sum of " + chunk + " from local rank" + ranks;
  const std::uint64_t next = base_ + written_ + 1;  // to be written, once all have read what was in its slot
  return "local rank" + behind(&Lane::read, next - std::min<std::uint64_t>(lane_.slots(), next)) +
         " to read the chunks before";
}

LaneBroadcast::LaneBroadcast(Lane& lane, Counters& counters, LaneTag tag, void* data, std::size_t bytes,
                             int root)
    : lane_(lane),
      counters_(counters),
      tag_(std::move(tag)),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      root_(root),
      finished_(bytes == 0) {}

bool LaneBroadcast::Step() {
  if (finished_) return false;
  return lane_.rank() == root_ ? Send() : Receive();
}

// Every rank counts every chunk, also those it has nothing to add to, so that the counters stay equal.
bool LaneBroadcast::Send() {
  bool moved = false;
  while (!finished_) {
    const std::uint64_t at = lane_.position;
    if (at >= lane_.slots() && !lane_.AllRead(at - lane_.slots() + 1)) break;
    const std::size_t bytes = std::min(lane_.slot_bytes(), bytes_ - moved_);
    Lane::SlotHeader& header = lane_.header(root_, at);
    header.signature = tag_.signature;
    header.sequence = tag_.sequence;
    header.bytes = bytes;
    CopyToPeers(lane_.slot(root_, at), data_ + moved_, bytes);
    counters_.shared_memory_bytes += bytes;
    moved_ += bytes;
    ++lane_.position;
    lane_.written(root_).store(at + 1, std::memory_order_release);
    lane_.reduced(root_).store(at + 1, std::memory_order_release);
    lane_.read(root_).store(at + 1, std::memory_order_release);
    finished_ = moved_ == bytes_;
    moved = true;
  }
  return moved;
}

bool LaneBroadcast::Receive() {
  bool moved = false;
  while (!finished_) {
    const std::uint64_t at = lane_.position;
    if (lane_.written(root_).load(std::memory_order_acquire) < at + 1) break;
    const Lane::SlotHeader& header = lane_.header(root_, at);
    if (header.sequence != tag_.sequence) break;  // another operation's turn
    const std::size_t bytes = static_cast<std::size_t>(header.bytes);
    if (moved_ + bytes > bytes_)
      throw Error("internal: a broadcast brought more bytes than this rank expects");
    Copy(data_ + moved_, lane_.slot(root_, at), bytes);
    moved_ += bytes;
    ++lane_.position;
    const int me = lane_.rank();
    lane_.written(me).store(at + 1, std::memory_order_release);
    lane_.reduced(me).store(at + 1, std::memory_order_release);
    lane_.read(me).store(at + 1, std::memory_order_release);
    finished_ = moved_ == bytes_;
    moved = true;
  }
  return moved;
}

std::string LaneBroadcast::Waiting() const {
  return "bytes " + std::to_string(moved_) + " to " + std::to_string(bytes_) + " from local rank " +
         std::to_string(root_);
}

}  // namespace hvpipe
