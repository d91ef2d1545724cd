// Compares what the algorithms cost.
#include "collectives/algorithm.h"

#include "base/error.h"

namespace hvpipe {
namespace {

// What adding a byte takes, of what sending it takes.
constexpr double kAdding = 0.1;
// A rank that waits for signals sends nothing at the end of each exchange. Measured on 8 hosts at 1 Gb/s.
constexpr double kPauses = 1.25;

}  // namespace

Algorithm ParseAlgorithm(const std::string& name) {
  if (name == "doubling") return Algorithm::kDoubling;
  if (name == "halving") return Algorithm::kHalving;
  if (name == "ring") return Algorithm::kRing;
  if (name == "mpi") return Algorithm::kMpi;
  throw Error("An algorithm should be doubling, halving, ring or mpi. Received: " + name, ErrorKind::kUsage);
}

Algorithm AlgorithmFor(int ranks, std::size_t bytes, double message_bytes, bool signals,
                       const std::vector<AlgorithmRow>& rows) {
  for (const AlgorithmRow& row : rows) {
    if (row.most_bytes == 0 || bytes <= row.most_bytes) return row.algorithm;
  }
  int rounds = 0;
  while (2 << rounds <= ranks) ++rounds;
  const double pairs = ranks > 1 << rounds ? 1 : 0;
  const double size = static_cast<double>(bytes) / message_bytes, others = ranks - 1;
  const double each = 1 + kAdding, both = 2 + kAdding;  // with its sum; and there and back
  const double share = 1 - 1.0 / (1 << rounds), start = signals ? 2 : 1, pauses = signals ? kPauses : 1;
  const double doubling = rounds * (start + each * size) + pairs * (2 * start + both * size);
  const double halving =
      2 * rounds * start + pauses * share * both * size + pairs * (2 * start + both * size);
  const double ring = 2 * others + (start - 1) + others / ranks * both * size;
  if (doubling <= halving && doubling <= ring) return Algorithm::kDoubling;
  return halving <= ring ? Algorithm::kHalving : Algorithm::kRing;
}

}  // namespace hvpipe
