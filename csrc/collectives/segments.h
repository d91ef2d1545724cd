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

// Below this size, the cost of a message itself outweighs that of its bytes.
inline constexpr std::size_t kLeastMessageBytes = 60'000;

// The size of the segments of `bytes` that a rank passes on, or adds, while it receives the others.
inline std::size_t SegmentBytes(std::size_t bytes, std::size_t most) {
  constexpr std::size_t kSeveral = 4;
  return std::clamp(bytes / kSeveral, std::min(kLeastMessageBytes, most), most);
}

}  // namespace hvpipe
