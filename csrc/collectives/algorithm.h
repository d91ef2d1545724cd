// Which algorithm sums an array over ranks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hvpipe {

enum class Algorithm { kDoubling, kHalving, kRing, kMpi };

// Throws unless it is "doubling", "halving", "ring" or "mpi".
Algorithm ParseAlgorithm(const std::string& name);

// What a user or a measurement has chosen.
struct AlgorithmRow {
  Algorithm algorithm;
  std::size_t most_bytes;  // of an array; 0: any
};

// The fastest for `ranks` and an array of `bytes`, by what messages cost: a fixed time each, a time for their
// bytes, and one for adding these (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
// operations in MPICH", 2005). `message_bytes`: see Transport. `signals`: ranks wait until their partners are
// ready (see ButterflyAllReduce). The first row that fits decides instead. All ranks choose alike.
Algorithm AlgorithmFor(int ranks, std::size_t bytes, double message_bytes, bool signals,
                       const std::vector<AlgorithmRow>& rows);

}  // namespace hvpipe
