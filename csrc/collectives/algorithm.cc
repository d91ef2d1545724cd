// Compares what the algorithms cost.
#include "collectives/algorithm.h"

#include <cstdlib>

namespace hvpipe {
namespace {

// A message of so many bytes takes twice the time of an empty one: between 8 KB (1 Gb/s) and 50 KB (10 Gb/s).
constexpr double kHalfSpeedBytes = 20'000;
// Larger arrays go around the ring, which shares the link with more urgent ones.
constexpr std::size_t kMostBytes = 240'000;

}  // namespace

Algorithm AlgorithmFor(int ranks, std::size_t bytes) {
  if (const char* forced = std::getenv("X_ALGORITHM")) return static_cast<Algorithm>(std::atoi(forced));
  if (bytes > kMostBytes) return Algorithm::kRing;
  int rounds = 0;
  while (2 << rounds <= ranks) ++rounds;
  const double power = 1 << rounds, pairs = ranks > 1 << rounds ? 2 : 0;
  const double size = static_cast<double>(bytes) / kHalfSpeedBytes, others = ranks - 1;
  const double doubling = (rounds + pairs) * (1 + size);
  const double halving = 2 * rounds + pairs + (2 * (1 - 1 / power) + pairs) * size;
  const double ring = 2 * others + 2 * others / ranks * size;
  if (doubling <= halving && doubling <= ring) return Algorithm::kDoubling;
  return halving <= ring ? Algorithm::kHalving : Algorithm::kRing;
}

}  // namespace hvpipe
