// One call of a named collective, and what ranks tell each other about it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"

namespace hvpipe::named {

// The numbers are part of the TensorFlow ops' attributes and of Horovod's Python constants: do not reorder.
enum class ReduceOp : std::int32_t { kAverage = 0, kSum = 1, kAdasum = 2, kMin = 3, kMax = 4, kProduct = 5 };

enum class Kind : std::int32_t {
  kAllreduce,
  kAllgather,
  kBroadcast,
  kAlltoall,
  kReducescatter,
  kBarrier,
  kJoin,
  kAddSet,     // ranks of the new process set: `splits`
  kRemoveSet,  // number of the process set: `root`
  kLeave,      // the rank makes no more calls
};

const char* NameOf(Kind kind);
const char* NameOf(ReduceOp op);

using Shape = std::vector<std::int64_t>;

struct TensorSpec {
  DType type = DType::kFloat32;
  Shape shape;

  std::int64_t rows() const { return shape.empty() ? 1 : shape.front(); }
  std::int64_t row_elements() const;  // the product of all axes but the first
  std::int64_t elements() const;
  std::size_t BytesOfRows(std::int64_t count) const;
  std::size_t bytes() const { return BytesOfRows(rows()); }
  std::string Described() const;  // such as "float32[2, 3]"
};

// What a rank tells the coordinator.
struct Request {
  Kind kind = Kind::kBarrier;
  std::string name;      // ranks that give the same name meet
  std::int32_t set = 0;  // process set; 0 is all ranks
  ReduceOp op = ReduceOp::kSum;
  std::int32_t root = 0;  // a rank of the world
  double prescale = 1, postscale = 1;
  std::vector<TensorSpec> tensors;   // several for a grouped call
  std::vector<std::int64_t> splits;  // alltoall: rows for each rank of the set
  std::string refused;               // why this rank cannot take part; empty: it can

  std::string Described() const;  // such as "allreduce (sum) of float32[2, 3]"
};

// What the coordinator tells the ranks of a process set. They run these in the order of arrival.
struct Response {
  Kind kind = Kind::kBarrier;
  std::string name;
  std::int32_t set = 0;
  std::string error;  // empty: none
  ErrorKind error_kind = ErrorKind::kUsage;
  // allgather: rows of each tensor on each rank, tensor by tensor; alltoall: rows that this rank gets from
  // each rank; add set: its ranks.
  std::vector<std::int64_t> extents;
  std::int32_t number = 0;       // add set: its number; join: the last rank that joined
  std::vector<Request> example;  // for ranks that have joined: the call, to which they add zeros
};

// A request with its data.
struct Call {
  Request request;
  std::vector<const void*> inputs;  // by tensor; they stay valid until `done`
  // Return memory for output `index`. Called on the driving thread; may throw.
  std::function<void*(int index, const Shape& shape)> allocate;
  // Called once, from another thread, without any lock held. Null: success. `response` has the extents and
  // the number.
  std::function<void(const Error* error, const Response* response)> done;
};

std::string Encoded(const Request& request);
std::string Encoded(const Response& response);
Request DecodedRequest(const std::string& bytes);
Response DecodedResponse(const std::string& bytes);

}  // namespace hvpipe::named
