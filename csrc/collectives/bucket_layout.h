// The layout of one gradient bucket: which tensor lies where in its fused buffer.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace hvpipe {

struct BucketLayout {
  std::string name;                  // for messages and the trace: the names of its first and last tensor
  DType tensor_type;                 // type of the gradients
  DType wire_type;                   // type of the fused buffer; differs from tensor_type under compression
  std::vector<std::size_t> counts;   // elements of each tensor, in order
  std::vector<std::size_t> offsets;  // first element of each tensor inside the fused buffer
  std::size_t count = 0;             // elements of the fused buffer, including the gaps that align tensors
  int priority = 0;                  // the next forward pass needs bucket 0 first
  // Not 0: the bucket is one table, with this many elements per row. Only its non-zero rows are sent.
  std::size_t row = 0;

  BucketLayout(std::string bucket_name, DType tensor, DType wire, std::vector<std::size_t> tensor_counts,
               int bucket_priority);
  std::size_t bytes() const { return count * SizeOf(wire_type); }
  bool compressed() const { return wire_type != tensor_type; }
};

}  // namespace hvpipe
