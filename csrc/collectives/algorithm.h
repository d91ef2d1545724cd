// Which algorithm sums an array over ranks.
#pragma once

#include <cstddef>

namespace hvpipe {

enum class Algorithm { kDoubling, kHalving, kRing };

// The fastest for `ranks` and an array of `bytes`, by what messages cost: a fixed time each, and a time for
// their bytes (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
// MPICH", 2005). All ranks choose alike.
Algorithm AlgorithmFor(int ranks, std::size_t bytes);

}  // namespace hvpipe
