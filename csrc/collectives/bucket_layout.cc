// Places tensors in a fused buffer, each on a cache line of its own.
#include "collectives/bucket_layout.h"

#include <utility>

#include "base/aligned_buffer.h"

namespace hvpipe {

BucketLayout::BucketLayout(std::string bucket_name, DType tensor, DType wire,
                           std::vector<std::size_t> tensor_counts, int bucket_priority)
    : name(std::move(bucket_name)),
      tensor_type(tensor),
      wire_type(wire),
      counts(std::move(tensor_counts)),
      priority(bucket_priority) {
  const std::size_t line = kAlignment / SizeOf(wire);
  offsets.reserve(counts.size());
  for (const std::size_t elements : counts) {
    count = (count + line - 1) / line * line;
    offsets.push_back(count);
    count += elements;
  }
}

}  // namespace hvpipe
