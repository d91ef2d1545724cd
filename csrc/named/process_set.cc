// MPI's collectives on tensors of any element type.
#include "named/process_set.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "core/mpi_error.h"
#include "named/numbers.h"

namespace hvpipe::named {
namespace {

constexpr int kAdasumTag = 1;
// MPI counts in int.
constexpr std::int64_t kMostAtOnce = std::int64_t{1} << 30;

int PlaceIn(const std::vector<int>& ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

int AsCount(std::int64_t value) {
  if (value > kMostAtOnce) {
    throw Error("A collective should have at most " + std::to_string(kMostAtOnce) +
                    " rows or elements. Received: " + std::to_string(value),
                ErrorKind::kUsage);
  }
  return static_cast<int>(value);
}

std::vector<int> AsCounts(const std::vector<std::int64_t>& values) {
  std::vector<int> counts;
  for (const std::int64_t value : values) counts.push_back(AsCount(value));
  return counts;
}

// Where each part begins.
std::vector<int> StartsOf(const std::vector<int>& counts) {
  std::vector<int> starts;
  std::int64_t next = 0;
  for (const int count : counts) {
    starts.push_back(AsCount(next));
    next += count;
  }
  return starts;
}

// One row of a tensor as an MPI type, so that counts stay small.
class RowType {
 public:
  explicit RowType(const TensorSpec& tensor) {
    HVPIPE_MPI(MPI_Type_contiguous(AsCount(tensor.row_elements()), MpiType(tensor.type), &type_));
    HVPIPE_MPI(MPI_Type_commit(&type_));
  }
  ~RowType() { MPI_Type_free(&type_); }
  RowType(const RowType&) = delete;
  RowType& operator=(const RowType&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

std::size_t BytesOf(const TensorSpec& tensor) {
  return static_cast<std::size_t>(tensor.elements()) * SizeOf(tensor.type);
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

ProcessSet::ProcessSet(MPI_Comm communicator, std::vector<int> ranks, int rank)
    : communicator_(communicator), ranks_(std::move(ranks)), place_(PlaceIn(ranks_, rank)) {}

int ProcessSet::PlaceOf(int rank) const { return PlaceIn(ranks_, rank); }

void ProcessSet::Free() {
  if (communicator_ != MPI_COMM_NULL) HVPIPE_MPI(MPI_Comm_free(&communicator_));
}

void ProcessSet::ReduceInPlace(void* data, Type type, std::int64_t count, const Request& request) const {
  ScaleNumbers(data, type, count, request.prescale);
  if (size() > 1 && request.op == ReduceOp::kAdasum) {
    Adasum(data, type, count);
  } else if (size() > 1) {
    for (std::int64_t start = 0; start < count; start += kMostAtOnce) {
      char* const part = static_cast<char*>(data) + static_cast<std::size_t>(start) * SizeOf(type);
      HVPIPE_MPI(MPI_Allreduce(MPI_IN_PLACE, part, static_cast<int>(std::min(count - start, kMostAtOnce)),
                               MpiType(type), MpiOp(request.op, type), communicator_));
    }
  }
  ScaleNumbers(data, type, count, FactorAfter(request));
}

double ProcessSet::FactorAfter(const Request& request) const {
  return request.op == ReduceOp::kAverage ? request.postscale * (1.0 / size()) : request.postscale;
}

// A tree in which the ranks of a pair compute the same sum in the same order.
void ProcessSet::Adasum(void* data, Type type, std::int64_t count) const {
  const std::size_t bytes = static_cast<std::size_t>(count) * SizeOf(type);
  const std::unique_ptr<char[]> theirs(new char[std::max<std::size_t>(bytes, 1)]);
  const int elements = AsCount(count);
  for (int distance = 1; distance < size(); distance *= 2) {
    const int partner = place_ ^ distance;
    HVPIPE_MPI(MPI_Sendrecv(data, elements, MpiType(type), partner, kAdasumTag, theirs.get(), elements,
                            MpiType(type), partner, kAdasumTag, communicator_, MPI_STATUS_IGNORE));
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
        CopyBytes(outputs[i], call.inputs[i], BytesOf(request.tensors[i]));
        ReduceInPlace(outputs[i], type, request.tensors[i].elements(), request);
      }
      continue;
    }
    std::int64_t count = 0;
    for (const std::size_t i : members) count += request.tensors[i].elements();
    const std::unique_ptr<char[]> fused(new char[static_cast<std::size_t>(count) * SizeOf(type) + 1]);
    char* at = fused.get();
    for (const std::size_t i : members) {
      CopyBytes(at, call.inputs[i], BytesOf(request.tensors[i]));
      at += BytesOf(request.tensors[i]);
    }
    ReduceInPlace(fused.get(), type, count, request);
    at = fused.get();
    for (const std::size_t i : members) {
      CopyBytes(outputs[i], at, BytesOf(request.tensors[i]));
      at += BytesOf(request.tensors[i]);
    }
  }
}

void ProcessSet::AllreduceZeros(const Request& example) const {
  Call call;
  call.request = example;
  std::vector<std::unique_ptr<char[]>> zeros;
  for (const TensorSpec& tensor : example.tensors) {
    zeros.emplace_back(new char[BytesOf(tensor) + 1]());
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
      CopyBytes(output, call.inputs[i], BytesOf(tensor));
      continue;
    }
    const RowType row(tensor);
    const std::vector<int> counts = AsCounts(mine);
    const std::vector<int> starts = StartsOf(counts);
    // A caller may have put its rows where they belong. MPI takes no buffer twice but by this name.
    const std::size_t place = static_cast<std::size_t>(place_);
    const std::int64_t bytes_before = starts[place] * BytesOf(tensor) / std::max(1, counts[place]);
    const bool in_place = call.inputs[i] == static_cast<char*>(output) + bytes_before;
    HVPIPE_MPI(MPI_Allgatherv(in_place ? MPI_IN_PLACE : call.inputs[i], counts[place], row.get(), output,
                              counts.data(), starts.data(), row.get(), communicator_));
  }
}

void ProcessSet::Broadcast(const Call& call) const {
  const int root = PlaceOf(call.request.root);
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorSpec& tensor = call.request.tensors[i];
    char* const output = static_cast<char*>(call.allocate(static_cast<int>(i), tensor.shape));
    if (place_ == root) CopyBytes(output, call.inputs[i], BytesOf(tensor));
    if (size() == 1) continue;
    const std::int64_t bytes = static_cast<std::int64_t>(BytesOf(tensor));
    for (std::int64_t start = 0; start < bytes; start += kMostAtOnce) {
      HVPIPE_MPI(MPI_Bcast(output + start, static_cast<int>(std::min(bytes - start, kMostAtOnce)), MPI_BYTE,
                           root, communicator_));
    }
  }
}

void ProcessSet::Alltoall(const Call& call, const std::vector<std::int64_t>& received) const {
  const TensorSpec& tensor = call.request.tensors.front();
  const std::int64_t total = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  void* const output = call.allocate(0, WithRows(tensor.shape, total));
  auto* const counts_out = static_cast<std::int32_t*>(call.allocate(1, {size()}));
  for (std::size_t i = 0; i < received.size(); ++i) counts_out[i] = static_cast<std::int32_t>(received[i]);
  if (tensor.row_elements() == 0) return;
  if (size() == 1) return CopyBytes(output, call.inputs.front(), BytesOf(tensor));
  const RowType row(tensor);
  const std::vector<int> sent = AsCounts(call.request.splits), got = AsCounts(received);
  const std::vector<int> from = StartsOf(sent), to = StartsOf(got);
  HVPIPE_MPI(MPI_Alltoallv(call.inputs.front(), sent.data(), from.data(), row.get(), output, got.data(),
                           to.data(), row.get(), communicator_));
}

void ProcessSet::Reducescatter(const Call& call) const {
  const Request& request = call.request;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorSpec& tensor = request.tensors[i];
    // The first ranks get one row more if the rows cannot be shared out evenly.
    const auto rows_of = [&](int place) {
      return tensor.rows() / size() + (place < tensor.rows() % size() ? 1 : 0);
    };
    std::vector<int> counts;
    for (int place = 0; place < size(); ++place) {
      counts.push_back(AsCount(rows_of(place) * tensor.row_elements()));
    }
    void* const output = call.allocate(static_cast<int>(i), WithRows(tensor.shape, rows_of(place_)));
    const std::int64_t own = counts[static_cast<std::size_t>(place_)];
    std::unique_ptr<char[]> scaled;
    const void* input = call.inputs[i];
    if (request.prescale != 1) {
      scaled.reset(new char[BytesOf(tensor) + 1]);
      CopyBytes(scaled.get(), input, BytesOf(tensor));
      ScaleNumbers(scaled.get(), tensor.type, tensor.elements(), request.prescale);
      input = scaled.get();
    }
    if (size() == 1) {
      CopyBytes(output, input, BytesOf(tensor));
    } else if (tensor.elements() > 0) {
      HVPIPE_MPI(MPI_Reduce_scatter(input, output, counts.data(), MpiType(tensor.type),
                                    MpiOp(request.op, tensor.type), communicator_));
    }
    ScaleNumbers(output, tensor.type, own, FactorAfter(request));
  }
}

}  // namespace hvpipe::named
