// How arrays and messages are cut into segments.
#pragma once

#include <algorithm>
#include <cstddef>

namespace hvpipe {

// The elements [first, first + count).
struct Range {
  std::size_t first = 0;
  std::size_t count = 0;
};

// Piece `index` of `count` elements that are cut into `pieces`. Sizes differ by at most one element.
inline Range SplitEvenly(std::size_t count, std::size_t pieces, std::size_t index) {
  const std::size_t base = count / pieces;
  const std::size_t extra = count % pieces;
  const std::size_t first = index * base + (index < extra ? index : extra);
  return {first, base + (index < extra ? 1 : 0)};
}

// How many segments of at most `segment_bytes` a message of `bytes` has. An empty message is one segment,
// because the receiver waits for it.
inline std::size_t SegmentsOf(std::size_t bytes, std::size_t segment_bytes) {
  return std::max<std::size_t>(1, (bytes + segment_bytes - 1) / segment_bytes);
}

}  // namespace hvpipe
