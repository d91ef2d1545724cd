// Checks one rank's call before the others hear of it.
#include "named/call_check.h"

#include <algorithm>
#include <numeric>

namespace hvpipe::named {

std::string Check(Request& request, const std::vector<int>& ranks, int rank) {
  if (ranks.empty()) {
    throw Error("Unknown process set. Received: process set " + std::to_string(request.set),
                ErrorKind::kUsage);
  }
  const int members = static_cast<int>(ranks.size());
  if (!std::binary_search(ranks.begin(), ranks.end(), rank)) {
    throw Error(std::string(NameOf(request.kind)) +
                    " should be called by ranks of its process set. Received: process set " +
                    std::to_string(request.set) + " on rank " + std::to_string(rank) + ", which is no member",
                ErrorKind::kUsage);
  }
  if (!request.refused.empty()) return request.refused;
  if (request.kind == Kind::kBroadcast && !std::binary_search(ranks.begin(), ranks.end(), request.root)) {
    std::string all;
    for (const int one : ranks) all += (all.empty() ? "" : ", ") + std::to_string(one);
    return "root_rank should be a rank of the process set, " + all +
           ". Received: root_rank=" + std::to_string(request.root);
  }
  if (request.op == ReduceOp::kAdasum && (members & (members - 1)) != 0) {
    return "Adasum should run on 2, 4, 8, ... ranks. Received: " + std::to_string(members) + " ranks";
  }
  const bool by_rows = request.kind == Kind::kAllgather || request.kind == Kind::kAlltoall ||
                       request.kind == Kind::kReducescatter;
  for (const TensorSpec& tensor : request.tensors) {
    if (request.op == ReduceOp::kAdasum && !IsFloating(tensor.type)) {
      return "Adasum should combine floating-point numbers. Received: " + tensor.Described();
    }
    if (by_rows && tensor.shape.empty()) {
      return std::string(NameOf(request.kind)) +
             " needs a tensor with at least one axis. Received: a scalar of " + NameOf(tensor.type);
    }
  }
  if (request.kind != Kind::kAlltoall) return "";
  const std::int64_t rows = request.tensors.front().rows();
  if (request.splits.empty()) {
    if (rows % members != 0) {
      return "alltoall without splits needs a first axis that " + std::to_string(members) +
             " ranks can share evenly. Received: " + request.tensors.front().Described();
    }
    request.splits.assign(static_cast<std::size_t>(members), rows / members);
    return "";
  }
  const bool negative =
      std::any_of(request.splits.begin(), request.splits.end(), [](std::int64_t rows_) { return rows_ < 0; });
  const std::int64_t total = std::accumulate(request.splits.begin(), request.splits.end(), std::int64_t{0});
  if (static_cast<int>(request.splits.size()) != members || negative || total > rows) {
    return "splits should be one number of rows for each of " + std::to_string(members) +
           " ranks, none below 0, in total at most " + std::to_string(rows) +
           ". Received: " + std::to_string(request.splits.size()) + " splits, in total " +
           std::to_string(total) + (negative ? ", one below 0" : "");
  }
  return "";
}

}  // namespace hvpipe::named
