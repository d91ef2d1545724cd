// Every call is made of three exchanges: all-to-all, all-gather and broadcast. Reductions compute between
// them. On one host reductions and broadcasts go through a window instead.
#include "named/call_stages.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "base/vector_loops.h"
#include "collectives/gather.h"
#include "named/numbers.h"

namespace hvpipe::named {
namespace {

using Bytes = std::unique_ptr<char[]>;

// Up to this size every rank sends all to all, in one round.
constexpr std::size_t kOneRoundBytes = 16'384;
// Elements of a larger reduction that are under way at a time. Bounds the memory that is needed besides.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;

std::size_t At(int place) { return static_cast<std::size_t>(place); }

// What each place gets of `count` elements or rows, when all share them out.
std::vector<std::int64_t> Shares(std::int64_t count, int places) {
  std::vector<std::int64_t> shares;
  for (int place = 0; place < places; ++place)
    shares.push_back(count / places + (place < count % places ? 1 : 0));
  return shares;
}

void CopyBytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

Shape WithRows(Shape shape, std::int64_t rows) {
  shape.front() = rows;
  return shape;
}

// The arrays of `count` elements of all places, which lie one after the other.
std::vector<const void*> PartsOf(const char* all, DType type, std::int64_t count, int places) {
  std::vector<const void*> parts;
  for (int each = 0; each < places; ++each)
    parts.push_back(all + static_cast<std::size_t>(each * count) * SizeOf(type));
  return parts;
}

std::vector<std::size_t> BytesOf(const std::vector<std::int64_t>& counts, std::size_t bytes_of_each) {
  std::vector<std::size_t> bytes;
  for (const std::int64_t count : counts) bytes.push_back(static_cast<std::size_t>(count) * bytes_of_each);
  return bytes;
}

struct Parcels {
  std::vector<SentPart> sends;
  std::vector<ReceivedPart> receives;
};

// An all-to-all: `sent` bytes of `source` go to each place in turn, and `received` bytes come from each to
// `target`. Copies what stays here.
Parcels ParcelsOf(const char* source, const std::vector<std::size_t>& sent, char* target,
                  const std::vector<std::size_t>& received, std::size_t own_place) {
  Parcels parcels;
  for (std::size_t other = 0; other < sent.size(); ++other) {
    if (other == own_place) {
      CopyBytes(target, source, received[other]);
    } else {
      parcels.sends.push_back({static_cast<int>(other), source, sent[other]});
      parcels.receives.push_back({static_cast<int>(other), target, received[other]});
    }
    source += sent[other];
    target += received[other];
  }
  return parcels;
}

// A step of a call: an exchange, then computing with what has arrived.
class ThenCompute : public Collective {
 public:
  ThenCompute(std::unique_ptr<Collective> exchange, std::function<void()> compute)
      : exchange_(std::move(exchange)), compute_(std::move(compute)) {}
  bool Step() override {
    const bool moved = !exchange_->done() && exchange_->Step();
    if (!exchange_->done()) return moved;
    if (compute_) compute_();
    done_ = true;
    return true;
  }
  bool done() const override { return done_; }
  std::string Waiting() const override { return exchange_->Waiting(); }
  std::vector<int> Ranks() const override { return exchange_->Ranks(); }

 private:
  const std::unique_ptr<Collective> exchange_;
  const std::function<void()> compute_;
  bool done_ = false;
};

class Stages {
 public:
  Stages(Operation& operation, std::shared_ptr<AgreedCall> agreed, Network* network, OrderQueue* order)
      : operation_(operation),
        agreed_(std::move(agreed)),
        network_(network),
        order_(order),
        call_(agreed_->call),
        request_(agreed_->call.request),
        members_(agreed_->members),
        tag_(agreed_->tag) {}

  void Allreduce();
  bool TravelsAlone(const TensorSpec& tensor) const;
  void Allgather();
  void Broadcast();
  void Alltoall();
  void Reducescatter();

 private:
  int size() const { return members_.size(); }
  std::size_t place() const { return At(members_.place); }
  void* Output(std::size_t index, const Shape& shape) const {
    return call_.allocate(static_cast<int>(index), shape);
  }
  using Make = std::function<std::unique_ptr<Collective>()>;
  void Add(Make make, std::function<void()> compute = nullptr);
  void AddExchange(std::vector<SentPart> sends, std::vector<ReceivedPart> receives,
                   std::function<void()> compute = nullptr);
  void Gather(const void* mine, char* all, std::vector<std::size_t> bytes,
              std::function<void()> compute = nullptr);
  void Reduce(const void* in, void* out, DType type, std::int64_t count);
  void ReduceInWindow(const void* in, void* out, DType type, std::int64_t count);
  OperationTag Tag() const { return {Hash(request_.name), static_cast<std::uint64_t>(tag_), request_.name}; }
  void ReduceShares(const char* in, char* out, const std::vector<std::int64_t>& counts, DType type);
  void Adasum(char* data, DType type, std::int64_t count);

  Operation& operation_;
  const std::shared_ptr<AgreedCall> agreed_;
  Network* const network_;
  OrderQueue* const order_;
  Call& call_;
  const Request& request_;
  const Members& members_;
  int tag_;
};

void Stages::Add(Make make, std::function<void()> compute) {
  operation_.AddStage([make = std::move(make), compute = std::move(compute), kept = agreed_](
                          const Operation&) { return std::make_unique<ThenCompute>(make(), compute); });
}

void Stages::AddExchange(std::vector<SentPart> sends, std::vector<ReceivedPart> receives,
                         std::function<void()> compute) {
  Add([sends = std::move(sends), receives = std::move(receives), network = network_,
       transport = members_.transport,
       tag = tag_] { return network->MakeExchange(*transport, sends, receives, tag); },
      std::move(compute));
}

// `bytes` of each place come to `all` in the order of places.
void Stages::Gather(const void* mine, char* all, std::vector<std::size_t> bytes,
                    std::function<void()> compute) {
  Add([mine, all, bytes = std::move(bytes), network = network_, transport = members_.transport,
       tag = tag_] { return network->MakeGather(*transport, mine, all, bytes, std::nullopt, tag); },
      std::move(compute));
}

// Each place gets the others' parts of its share in their own type, and reduces them in the order of places.
// So results have the same bits over every network, and half types are rounded once.
void Stages::ReduceShares(const char* in, char* out, const std::vector<std::int64_t>& counts, DType type) {
  const auto all = std::make_shared<Bytes>();  // only while the exchange is under way
  const std::int64_t own = counts[place()];
  const std::vector<std::size_t> sent = BytesOf(counts, SizeOf(type));
  const std::vector<std::size_t> received(counts.size(), sent[place()]);
  const auto make = [all, in, sent, received, place = place(), network = network_,
                     transport = members_.transport, tag = tag_] {
    all->reset(new char[std::accumulate(received.begin(), received.end(), std::size_t{1})]);
    const Parcels parcels = ParcelsOf(in, sent, all->get(), received, place);
    return network->MakeExchange(*transport, parcels.sends, parcels.receives, tag);
  };
  Add(make, [all, out, own, type, kept = agreed_] {
    const std::vector<const void*> parts = PartsOf(all->get(), type, own, kept->members.size());
    ReduceParts(kept->call.request, type, parts, out, own);
    all->reset();
  });
}

// Every number is reduced in the order of places, as in ReduceShares.
void Stages::ReduceInWindow(const void* in, void* out, DType type, std::int64_t count) {
  operation_.AddStage(
      [=, tag = Tag(), kept = agreed_, network = network_](const Operation&) {
        const auto reduce = [kept = kept.get(), type](void* target, const void* const* parts,
                                                      std::size_t ranks, std::size_t elements) {
          const std::vector<const void*> of_ranks(parts, parts + ranks);
          ReduceParts(kept->call.request, type, of_ranks, target, static_cast<std::int64_t>(elements));
        };
        return network->MakeReduce(*kept->members.window, tag, in, out, static_cast<std::size_t>(count), type,
                                   reduce);
      },
      order_);
}

// `out` becomes the reduction of `in` over the members. As few bytes travel as in a ring.
void Stages::Reduce(const void* in, void* out, DType type, std::int64_t count) {
  if (count == 0) return;
  if (size() == 1) return ReduceParts(request_, type, {in}, out, count);
  const bool adasum = request_.op == ReduceOp::kAdasum;
  if (members_.window != nullptr && !adasum) return ReduceInWindow(in, out, type, count);
  const std::size_t bytes = static_cast<std::size_t>(count) * SizeOf(type);
  CopyBytes(out, in, bytes);
  auto* const data = static_cast<char*>(out);
  if (adasum) return Adasum(data, type, count);
  if (bytes <= kOneRoundBytes) {
    const std::shared_ptr<char[]> all(new char[bytes * At(size())]);
    return Gather(data, all.get(), std::vector<std::size_t>(At(size()), bytes),
                  [all, parts = PartsOf(all.get(), type, count, size()), data, type, count,
                   &request = request_] { ReduceParts(request, type, parts, data, count); });
  }
  for (std::int64_t start = 0; start < count; start += kPieceElements) {
    char* const piece = data + static_cast<std::size_t>(start) * SizeOf(type);
    const std::vector<std::int64_t> shares = Shares(std::min(count - start, kPieceElements), size());
    const std::vector<std::size_t> share_bytes = BytesOf(shares, SizeOf(type));
    char* const own = std::accumulate(share_bytes.begin(), share_bytes.begin() + members_.place, piece);
    ReduceShares(piece, own, shares, type);
    Gather(own, piece, share_bytes);
  }
}

// A tree in which the ranks of a pair compute the same sum in the same order.
void Stages::Adasum(char* data, DType type, std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * SizeOf(type);
  const auto elements = static_cast<std::size_t>(count);
  const std::shared_ptr<char[]> theirs(new char[bytes]);
  Scale(data, type, elements, request_.prescale);
  for (int distance = 1; distance < size(); distance *= 2) {
    const int partner = members_.place ^ distance;
    const bool lower = members_.place < partner;
    const bool last = 2 * distance >= size();
    AddExchange({{partner, data, bytes}}, {{partner, theirs.get(), bytes}},
                [theirs, data, type, count, elements, lower, last, &request = request_] {
                  const void* const a = lower ? data : theirs.get();
                  const void* const b = lower ? theirs.get() : data;
                  const AdasumFactors of = FactorsOf(a, b, type, count);
                  Combine(data, theirs.get(), type, count, lower ? of : AdasumFactors{of.of_b, of.of_a});
                  if (last) Scale(data, type, elements, request.postscale);
                });
  }
}

// Whether a tensor of a group is not copied into an array with others.
bool Stages::TravelsAlone(const TensorSpec& tensor) const {
  constexpr std::size_t kLargeInWindow = 32'768;
  const bool large = members_.window != nullptr && tensor.bytes() >= kLargeInWindow;
  return large || size() == 1 || request_.op == ReduceOp::kAdasum;
}

// Tensors of one type travel as one array.
void Stages::Allreduce() {
  std::vector<char*> outputs;
  for (std::size_t i = 0; i < call_.inputs.size(); ++i)
    outputs.push_back(static_cast<char*>(Output(i, request_.tensors[i].shape)));
  std::vector<std::size_t> left(call_.inputs.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  while (!left.empty()) {
    const DType type = request_.tensors[left.front()].type;
    const bool alone = TravelsAlone(request_.tensors[left.front()]);
    const auto others = std::stable_partition(left.begin(), left.end(), [&](std::size_t i) {
      const TensorSpec& tensor = request_.tensors[i];
      return tensor.type == type && TravelsAlone(tensor) == alone;
    });
    const std::vector<std::size_t> group(left.begin(), others);
    left.erase(left.begin(), others);
    if (alone || group.size() == 1) {
      for (const std::size_t i : group) {
        Reduce(call_.inputs[i], outputs[i], type, request_.tensors[i].elements());
      }
      continue;
    }
    std::int64_t count = 0;
    for (const std::size_t i : group) count += request_.tensors[i].elements();
    const std::shared_ptr<char[]> fused(new char[static_cast<std::size_t>(count) * SizeOf(type) + 1]);
    char* at = fused.get();
    for (const std::size_t i : group) {
      CopyBytes(at, call_.inputs[i], request_.tensors[i].bytes());
      at += request_.tensors[i].bytes();
    }
    Reduce(fused.get(), fused.get(), type, count);
    const auto unpack = [fused, group, outputs, &request = request_] {
      const char* from = fused.get();
      for (const std::size_t i : group) {
        CopyBytes(outputs[i], from, request.tensors[i].bytes());
        from += request.tensors[i].bytes();
      }
    };
    Add([] { return std::make_unique<ConcurrentCollectives>(std::vector<std::unique_ptr<Collective>>()); },
        unpack);
  }
}

void Stages::Allgather() {
  auto rows = agreed_->response.extents.begin();
  for (std::size_t i = 0; i < call_.inputs.size(); ++i, rows += size()) {
    const TensorSpec& tensor = request_.tensors[i];
    const std::vector<std::int64_t> mine(rows, rows + size());
    const std::int64_t total = std::accumulate(mine.begin(), mine.end(), std::int64_t{0});
    auto* const output = static_cast<char*>(Output(i, WithRows(tensor.shape, total)));
    if (size() == 1) {
      CopyBytes(output, call_.inputs[i], tensor.bytes());
    } else {
      Gather(call_.inputs[i], output, BytesOf(mine, tensor.BytesOfRows(1)));
    }
  }
}

void Stages::Broadcast() {
  const int root = members_.PlaceOf(request_.root);
  std::vector<std::pair<void*, std::size_t>> arrays;
  for (std::size_t i = 0; i < call_.inputs.size(); ++i) {
    const TensorSpec& tensor = request_.tensors[i];
    void* const output = Output(i, tensor.shape);
    if (members_.place == root) CopyBytes(output, call_.inputs[i], tensor.bytes());
    arrays.emplace_back(output, tensor.bytes());
  }
  if (size() == 1) return;
  if (members_.window != nullptr) {
    for (const auto& [data, bytes] : arrays) {
      operation_.AddStage(
          [=, tag = Tag(), network = network_, window = members_.window, to = data, length = bytes](
              const Operation&) { return network->MakeBroadcast(*window, tag, to, length, root); },
          order_);
    }
    return;
  }
  Add([arrays, root, network = network_, transport = members_.transport, tag = tag_] {
    std::vector<std::unique_ptr<Collective>> each;
    int own_tag = tag;
    for (const auto& [data, bytes] : arrays)
      each.push_back(network->MakeBroadcast(*transport, data, bytes, root, own_tag++));
    return std::make_unique<ConcurrentCollectives>(std::move(each));
  });
}

void Stages::Alltoall() {
  const TensorSpec& tensor = request_.tensors.front();
  const std::vector<std::int64_t>& received = agreed_->response.extents;
  const std::int64_t total = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  auto* const target = static_cast<char*>(Output(0, WithRows(tensor.shape, total)));
  auto* const counts = static_cast<std::int32_t*>(Output(1, {size()}));
  for (std::size_t other = 0; other < received.size(); ++other)
    counts[other] = static_cast<std::int32_t>(received[other]);
  const std::size_t row_bytes = tensor.BytesOfRows(1);
  Parcels parcels =
      ParcelsOf(static_cast<const char*>(call_.inputs.front()), BytesOf(request_.splits, row_bytes), target,
                BytesOf(received, row_bytes), place());
  if (size() > 1) AddExchange(std::move(parcels.sends), std::move(parcels.receives));
}

// The first ranks get one row more if the rows cannot be shared out evenly.
void Stages::Reducescatter() {
  for (std::size_t i = 0; i < call_.inputs.size(); ++i) {
    const TensorSpec& tensor = request_.tensors[i];
    const std::vector<std::int64_t> rows = Shares(tensor.rows(), size());
    std::vector<std::int64_t> counts;
    for (const std::int64_t each : rows) counts.push_back(each * tensor.row_elements());
    auto* const output = static_cast<char*>(Output(i, WithRows(tensor.shape, rows[place()])));
    const auto* const input = static_cast<const char*>(call_.inputs[i]);
    if (size() == 1) {
      ReduceParts(request_, tensor.type, {input}, output, counts.front());
    } else {
      ReduceShares(input, output, counts, tensor.type);
    }
  }
}

}  // namespace

int Members::PlaceOf(int rank) const {
  const auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() || *found != rank ? -1 : static_cast<int>(found - ranks.begin());
}

void AddStages(Operation& operation, const std::shared_ptr<AgreedCall>& agreed, Network* network,
               OrderQueue* order) {
  Stages stages(operation, agreed, network, order);
  switch (agreed->call.request.kind) {
    case Kind::kAllreduce:
      return stages.Allreduce();
    case Kind::kAllgather:
      return stages.Allgather();
    case Kind::kBroadcast:
      return stages.Broadcast();
    case Kind::kAlltoall:
      return stages.Alltoall();
    case Kind::kReducescatter:
      return stages.Reducescatter();
    case Kind::kBarrier:
    case Kind::kJoin:
    case Kind::kAddSet:
    case Kind::kRemoveSet:
    case Kind::kLeave:
      return;
  }
}

Call ZerosFor(const Request& example, std::vector<std::unique_ptr<char[]>>& memory) {
  Call call;
  call.request = example;
  for (const TensorSpec& tensor : example.tensors) {
    memory.emplace_back(new char[tensor.bytes() + 1]());
    call.inputs.push_back(memory.back().get());
  }
  call.allocate = [&memory](int index, const Shape&) {
    return memory[static_cast<std::size_t>(index)].get();
  };
  return call;
}

}  // namespace hvpipe::named
