// Turns calls into collectives of their tensors: outputs, factors, groups.
#include "named/process_set.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "named/numbers.h"

namespace hvpipe::named {
namespace {

int PlaceIn(const std::vector<int>& ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

void CopyBytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

Shape WithRows(Shape shape, std::int64_t rows) {
  shape.front() = rows;
  return shape;
}

// Tensors of one type, one after the other. A group travels as one message for each type.
std::vector<std::pair<Type, std::vector<std::size_t>>> ByType(const std::vector<TensorSpec>& tensors) {
  std::vector<std::pair<Type, std::vector<std::size_t>>> groups;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto same = [&](const auto& group) { return group.first == tensors[i].type; };
    auto found = std::find_if(groups.begin(), groups.end(), same);
    if (found == groups.end()) found = groups.insert(groups.end(), {tensors[i].type, {}});
    found->second.push_back(i);
  }
  return groups;
}

}  // namespace

ProcessSet::ProcessSet(std::unique_ptr<SetLinks> links, std::vector<int> ranks, int rank)
    : links_(std::move(links)), ranks_(std::move(ranks)), place_(PlaceIn(ranks_, rank)) {}

int ProcessSet::PlaceOf(int rank) const { return PlaceIn(ranks_, rank); }

void ProcessSet::Free() {
  if (links_) links_->Free();
}

void ProcessSet::ReduceInPlace(void* data, Type type, std::int64_t count, const Request& request) const {
  if (count == 0) return;
  if (NeedsWiderType(request, type)) return ReduceWider(static_cast<char*>(data), type, count, request);
  ScaleNumbers(data, type, count, request.prescale);
  if (size() > 1 && request.op == ReduceOp::kAdasum) {
    Adasum(data, type, count);
  } else if (size() > 1) {
    links_->AllReduce(data, count, type, request.op);
  }
  ScaleSum(data, type, count, request);
}

// Each rank gets the others' parts of its share in their own type, reduces them in the order of places, and
// sends its share to all. So as few bytes travel as in a ring, and results have the same bits over MPI and
// TCP.
void ProcessSet::ReduceWider(char* data, Type type, std::int64_t count, const Request& request) const {
  if (size() == 1) return ReduceParts(request, type, {data}, data, count);
  const auto places = static_cast<std::size_t>(size());
  const std::size_t element = SizeOf(type);
  const TensorSpec each{type, {1}};
  if (static_cast<std::size_t>(count) * element <= kOneRoundBytes) {
    const std::unique_ptr<char[]> all(new char[places * static_cast<std::size_t>(count) * element]);
    links_->AllGather(data, all.get(), std::vector<std::int64_t>(places, count), each);
    return ReduceParts(request, type, PartsOf(all.get(), type, count), data, count);
  }
  constexpr std::int64_t kPiece = std::int64_t{1} << 24;  // bounds the memory that is needed besides
  std::unique_ptr<char[]> parts(
      new char[(static_cast<std::size_t>(std::min(count, kPiece)) + places) * element]);
  for (std::int64_t start = 0; start < count; start += kPiece) {
    char* const piece = data + static_cast<std::size_t>(start) * element;
    const std::vector<std::int64_t> shares = Shares(std::min(count - start, kPiece), size());
    const std::int64_t own = shares[static_cast<std::size_t>(place_)];
    links_->AllToAll(piece, shares, parts.get(), std::vector<std::int64_t>(places, own), each);
    ReduceParts(request, type, PartsOf(parts.get(), type, own), parts.get(), own);
    links_->AllGather(parts.get(), piece, shares, each);
  }
}

// The arrays of `count` elements of all places, which lie one after the other.
std::vector<const void*> ProcessSet::PartsOf(const char* all, Type type, std::int64_t count) const {
  std::vector<const void*> parts;
  for (int place = 0; place < size(); ++place)
    parts.push_back(all + static_cast<std::size_t>(place * count) * SizeOf(type));
  return parts;
}

void ProcessSet::ScaleSum(void* data, Type type, std::int64_t count, const Request& request) const {
  if (!IsFloating(type)) return;  // integers that are scaled take the way above
  ScaleNumbers(data, type, count,
               request.op == ReduceOp::kAverage ? request.postscale / size() : request.postscale);
}

// A tree in which the ranks of a pair compute the same sum in the same order.
void ProcessSet::Adasum(void* data, Type type, std::int64_t count) const {
  const std::size_t bytes = static_cast<std::size_t>(count) * SizeOf(type);
  const std::unique_ptr<char[]> theirs(new char[std::max<std::size_t>(bytes, 1)]);
  for (int distance = 1; distance < size(); distance *= 2) {
    const int partner = place_ ^ distance;
    links_->Exchange(data, theirs.get(), bytes, partner);
    const bool lower = place_ < partner;
    const void* const a = lower ? data : theirs.get();
    const void* const b = lower ? theirs.get() : data;
    const AdasumFactors factors = FactorsOf(a, b, type, count);
    Combine(data, theirs.get(), type, count, lower ? factors : AdasumFactors{factors.of_b, factors.of_a});
  }
}

void ProcessSet::Allreduce(const Call& call) const {
  const Request& request = call.request;
  std::vector<void*> outputs;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    outputs.push_back(call.allocate(static_cast<int>(i), request.tensors[i].shape));
  }
  for (const auto& [type, members] : ByType(request.tensors)) {
    if (members.size() == 1 || size() == 1 || request.op == ReduceOp::kAdasum) {
      for (const std::size_t i : members) {
        CopyBytes(outputs[i], call.inputs[i], request.tensors[i].bytes());
        ReduceInPlace(outputs[i], type, request.tensors[i].elements(), request);
      }
      continue;
    }
    std::int64_t count = 0;
    for (const std::size_t i : members) count += request.tensors[i].elements();
    const std::unique_ptr<char[]> fused(new char[static_cast<std::size_t>(count) * SizeOf(type) + 1]);
    char* at = fused.get();
    for (const std::size_t i : members) {
      CopyBytes(at, call.inputs[i], request.tensors[i].bytes());
      at += request.tensors[i].bytes();
    }
    ReduceInPlace(fused.get(), type, count, request);
    at = fused.get();
    for (const std::size_t i : members) {
      CopyBytes(outputs[i], at, request.tensors[i].bytes());
      at += request.tensors[i].bytes();
    }
  }
}

void ProcessSet::AllreduceZeros(const Request& example) const {
  Call call;
  call.request = example;
  std::vector<std::unique_ptr<char[]>> zeros;
  for (const TensorSpec& tensor : example.tensors) {
    zeros.emplace_back(new char[tensor.bytes() + 1]());
    call.inputs.push_back(zeros.back().get());
  }
  call.allocate = [&](int index, const Shape&) { return zeros[static_cast<std::size_t>(index)].get(); };
  Allreduce(call);
}

void ProcessSet::Allgather(const Call& call, const std::vector<std::int64_t>& rows) const {
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorSpec& tensor = call.request.tensors[i];
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(i) * size();
    const std::vector<std::int64_t> mine(begin, begin + size());
    const std::int64_t total = std::accumulate(mine.begin(), mine.end(), std::int64_t{0});
    void* const output = call.allocate(static_cast<int>(i), WithRows(tensor.shape, total));
    if (total * tensor.row_elements() == 0) continue;
    if (size() == 1) {
      CopyBytes(output, call.inputs[i], tensor.bytes());
      continue;
    }
    links_->AllGather(call.inputs[i], output, mine, tensor);
  }
}

void ProcessSet::Broadcast(const Call& call) const {
  const int root = PlaceOf(call.request.root);
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorSpec& tensor = call.request.tensors[i];
    char* const output = static_cast<char*>(call.allocate(static_cast<int>(i), tensor.shape));
    if (place_ == root) CopyBytes(output, call.inputs[i], tensor.bytes());
    if (size() > 1) links_->Broadcast(output, tensor.bytes(), root);
  }
}

void ProcessSet::Alltoall(const Call& call, const std::vector<std::int64_t>& received) const {
  const TensorSpec& tensor = call.request.tensors.front();
  const std::int64_t total = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  void* const output = call.allocate(0, WithRows(tensor.shape, total));
  auto* const counts_out = static_cast<std::int32_t*>(call.allocate(1, {size()}));
  for (std::size_t i = 0; i < received.size(); ++i) counts_out[i] = static_cast<std::int32_t>(received[i]);
  if (tensor.row_elements() == 0) return;
  if (size() == 1) return CopyBytes(output, call.inputs.front(), tensor.BytesOfRows(total));
  links_->AllToAll(call.inputs.front(), call.request.splits, output, received, tensor);
}

void ProcessSet::Reducescatter(const Call& call) const {
  const Request& request = call.request;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorSpec& tensor = request.tensors[i];
    // The first ranks get one row more if the rows cannot be shared out evenly.
    const std::vector<std::int64_t> rows = Shares(tensor.rows(), size());
    std::vector<std::int64_t> counts;
    for (const std::int64_t each : rows) counts.push_back(each * tensor.row_elements());
    void* const output =
        call.allocate(static_cast<int>(i), WithRows(tensor.shape, rows[static_cast<std::size_t>(place_)]));
    const std::int64_t own = counts[static_cast<std::size_t>(place_)];
    if (tensor.elements() > 0 && NeedsWiderType(request, tensor.type)) {
      const auto places = static_cast<std::size_t>(size());
      const std::unique_ptr<char[]> parts(
          new char[places * static_cast<std::size_t>(own) * SizeOf(tensor.type) + 1]);
      if (size() == 1) {
        CopyBytes(parts.get(), call.inputs[i], tensor.bytes());
      } else {
        links_->AllToAll(call.inputs[i], counts, parts.get(), std::vector<std::int64_t>(places, own),
                         {tensor.type, {1}});
      }
      ReduceParts(request, tensor.type, PartsOf(parts.get(), tensor.type, own), output, own);
      continue;
    }
    std::unique_ptr<char[]> scaled;
    const void* input = call.inputs[i];
    if (request.prescale != 1) {
      scaled.reset(new char[tensor.bytes() + 1]);
      CopyBytes(scaled.get(), input, tensor.bytes());
      ScaleNumbers(scaled.get(), tensor.type, tensor.elements(), request.prescale);
      input = scaled.get();
    }
    if (size() == 1) {
      CopyBytes(output, input, tensor.bytes());
    } else if (tensor.elements() > 0) {
      links_->ReduceScatter(input, output, counts, tensor.type, request.op);
    }
    ScaleSum(output, tensor.type, own, request);
  }
}

}  // namespace hvpipe::named
