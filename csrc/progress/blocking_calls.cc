// Runs blocking collectives, which the calling thread drives.
#include "progress/blocking_calls.h"

#include <cstring>
#include <utility>

#include "base/vector_loops.h"
#include "collectives/tags.h"

namespace hvpipe {

// Another thread of a rank may be about to make the call that is missing.
constexpr double kPatienceS = 1.0;
// Up to this size an all-reduce runs beside its check. Later checks wait for it.
constexpr std::size_t kBesideCheckBytes = 4'000'000;

std::shared_ptr<Operation> BlockingCalls::MakeOperation(const std::string& what) {
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->priority = kBlockingPriority;
  return operation;
}

int BlockingCalls::NextTag() { return kFirstCallTag + static_cast<int>(calls_++ % kCallTags); }

// On one host an all-reduce needs no check of its own: the slots of the window hold the same information.
void BlockingCalls::CheckSameCall(const std::string& what, const Interrupt& interrupt) {
  auto operation = MakeOperation(what);
  agreement_.AddStage(*operation, 0, Hash(what));
  operation->check = [this](Operation& done) { (void)agreement_.Checked(done); };
  progress_.Run(operation, interrupt);
}

void BlockingCalls::RunChecked(const std::string& what, Operation::MakeCollective make,
                               const Interrupt& interrupt) {
  CheckSameCall(what, interrupt);
  auto operation = MakeOperation(what);
  operation->AddStage(std::move(make));
  progress_.Run(operation, interrupt);
}

// A tag that only this call has, so that its messages meet none of another call. Empty if MPI has too few.
std::optional<int> BlockingCalls::OwnTag(const std::string& what, const Transport& ring) {
  constexpr int kFirst = 32768, kLeast = 1 << 20;
  if (ring.most_tag() - kFirst < kLeast) return std::nullopt;
  const std::uint64_t key = Hash(what) + 0x9e3779b97f4a7c15u * calls_++;
  return kFirst + static_cast<int>(key % static_cast<std::uint64_t>(ring.most_tag() - kFirst));
}

// The array travels with what the ranks compare, or while they do: one round trip less.
void BlockingCalls::AllReduceChecked(const void* in, void* out, std::size_t count, DType dtype, double scale,
                                     const std::string& what, Transport& ring, std::optional<int> own_tag,
                                     const Interrupt& interrupt) {
  const auto make = [&](std::uint64_t sequence) {
    if (!own_tag) return agreement_.MakeWithin(what, sequence, in, out, count, dtype);
    return agreement_.MakeBeside(what, sequence, route_.MakeAllReduce(ring, in, out, count, dtype, *own_tag));
  };
  const auto queued = [&] {
    auto operation = MakeOperation(what);
    operation->traced = "reduce";
    agreement_.AddStage(*operation, [&](const Operation& op) { return make(op.sequence()); });
    return operation;
  };
  progress_.RunBrief(std::ref(make), std::ref(queued), interrupt, true);
  Scale(out, dtype, count, scale);
}

void BlockingCalls::AllReduce(const void* in, void* out, std::size_t count, DType dtype, double scale,
                              const std::string& what, const Interrupt& interrupt) {
  if (network_.topology().size == 1) {
    ScaleAndCast(in, dtype, out, dtype, count, scale);
    return;
  }
  const Turns::Turn turn = TakeTurn(interrupt);
  SharedWindow* const window = route_.only_window();
  Transport* const ring = route_.only_ring();
  const std::size_t bytes = count * SizeOf(dtype);
  if (ring != nullptr && !route_.ring_is_mpis(bytes) && (dtype != DType::kFloat16 || scale == 1.0)) {
    const bool within = GatheredAllReduce::Fits(ring->size(), bytes) &&
                        network_.AlgorithmOf(*ring, bytes) == Algorithm::kDoubling;
    const auto own_tag = within || bytes > kBesideCheckBytes ? std::nullopt : OwnTag(what, *ring);
    if (within || own_tag)
      return AllReduceChecked(in, out, count, dtype, scale, what, *ring, own_tag, interrupt);
  }
  if (window == nullptr) CheckSameCall(what, interrupt);
  if (dtype == DType::kFloat16 && scale != 1.0) {  // scale first: the sum may exceed the range of float16
    ScaleAndCast(in, dtype, out, dtype, count, scale);
    in = out;
    scale = 1.0;
  }
  const ReduceBuffers buffers{in, out, count};
  const int tag = NextTag();
  std::shared_ptr<Operation> own;
  const auto queued = [&] {
    own = MakeOperation(what);
    const auto& operation = own;
    operation->traced = "reduce";
    route_.AddStages(*operation, std::make_shared<const ReduceBuffers>(buffers), dtype, scale, tag);
    return operation;
  };
  if (window == nullptr) return progress_.Run(queued(), interrupt);
  // Within a host, only shared memory says where the peers are. Without this check a rank would wait until
  // the deadline for a peer that makes another call.
  double first_look_s = 0;
  const auto watched = [&] {
    interrupt();
    if (first_look_s == 0) first_look_s = Now();
    if (Now() - first_look_s > kPatienceS) CheckPeersAreHere(*window, *own);
  };
  if (bytes > window->slot_bytes()) return progress_.Run(queued(), std::ref(watched));
  const auto make = [&](std::uint64_t sequence) {
    return route_.MakeSharedReduce(OperationTagOf(what, sequence), buffers, dtype, scale,
                                   SharedMemoryReduce::Result::kAll);
  };
  progress_.RunBrief(std::ref(make), std::ref(queued), std::ref(watched), false);
}

// Throw if a rank waits in shared memory for this one, which leaves: only so does this one learn of it.
void BlockingCalls::CheckNobodyWaits(const std::string& shown) {
  const SharedWindow* const window = route_.only_window();
  if (window == nullptr) return;
  const int rank = network_.topology().rank;
  const std::uint64_t next = window->written(rank).load(std::memory_order_relaxed);
  for (int peer = 0; peer < window->size(); ++peer) {
    if (window->written(peer).load(std::memory_order_acquire) <= next) continue;
    throw Disagreement("Rank", rank, shown, peer, window->header(peer, next).what);
  }
}

// Throw if the next rank is at another call: it has sent a control record instead of writing to the window.
// The record of a later operation proves nothing, because another thread of this rank may be about to
// announce it.
void BlockingCalls::CheckPeersAreHere(SharedWindow& window, const Operation& own) {
  const Topology& topology = network_.topology();
  const int above = (topology.rank + 1) % topology.size;
  const auto& theirs = window.written(above);
  const auto& mine = window.written(topology.rank);
  if (theirs.load(std::memory_order_acquire) >= mine.load(std::memory_order_relaxed)) return;
  const std::optional<Record> record = EarlyRecord();
  if (!record || record->sequence > own.sequence()) return;
  throw DifferentCalls(topology.rank, own.what, *record);
}

std::optional<Record> BlockingCalls::EarlyRecord() {
  std::optional<Record> record;
  progress_.WhileNobodyDrives([&] { record = agreement_.Unanswered(); });
  return record;
}

void BlockingCalls::Broadcast(void* data, std::size_t bytes, int root, const std::string& what,
                              const Interrupt& interrupt) {
  if (network_.topology().size == 1) return;
  const Turns::Turn turn = TakeTurn(interrupt);
  const int tag = NextTag();
  RunChecked(
      what,
      [=](const Operation&) { return network_.MakeBroadcast(network_.copies(), data, bytes, root, tag); },
      interrupt);
}

void BlockingCalls::Gather(const void* in, void* out, const std::vector<std::size_t>& bytes,
                           std::optional<int> root, const std::string& what, const Interrupt& interrupt) {
  if (network_.topology().size == 1) {
    if (in != out && bytes.front() > 0) std::memcpy(out, in, bytes.front());
    return;
  }
  const Turns::Turn turn = TakeTurn(interrupt);
  const int tag = NextTag();
  RunChecked(
      what,
      [=](const Operation&) { return network_.MakeGather(network_.copies(), in, out, bytes, root, tag); },
      interrupt);
}

std::vector<double> BlockingCalls::Agree(const std::string& what, double samples, const Interrupt& interrupt,
                                         const Patience& patience) {
  const int size = network_.topology().size;
  if (size == 1) return {samples};
  const Turns::Turn turn = TakeTurn(interrupt);
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->priority = kControlPriority;
  operation->limit_s = patience.limit_s;
  agreement_.AddStage(*operation, samples, Hash(what), patience.shown);
  std::vector<double> all;
  operation->check = [this, size, &all](Operation& done) {
    const ControlExchange& exchange = agreement_.Checked(done);
    for (int rank = 0; rank < size; ++rank) all.push_back(exchange.SamplesOf(rank));
  };
  const double start_s = Now();
  bool told = !patience.late;
  const auto watched = [&] {
    interrupt();
    if (what == kLeaving && Now() - start_s > kPatienceS) CheckNobodyWaits(patience.shown);
    if (told || Now() - start_s < patience.late_s) return;
    told = true;
    std::optional<int> missing;
    progress_.WhileNobodyDrives([&] { missing = Agreement::Missing(*operation); });
    if (missing) patience.late(*missing);
  };
  progress_.Run(operation, watched);
  return all;
}

}  // namespace hvpipe
