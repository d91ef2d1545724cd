// Settings of an engine.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "collectives/algorithm.h"

namespace hvpipe {

struct EngineOptions {
  double timeout_s = 300;            // longest wait for a peer
  double first_steps_timeout_s = 0;  // the same until two training steps have ended, if that is longer
  double shortest_nap_s = 50e-6;     // sleep of the progress thread when nothing makes progress
  double longest_nap_s = 1e-3;
  std::size_t segment_bytes = 60'000;    // largest ring message; jobs set it by MPI's eager limit
  int messages_in_flight = 8;            // ring messages that this rank may have under way
  std::size_t slot_bytes = 256 * 1024;   // of the shared-memory window
  bool fast_network = false;             // MPI sends through memory or by cards made for it
  bool shared_memory = true;             // false: ranks of one host use the network as well
  std::vector<AlgorithmRow> algorithms;  // of all-reduces over the network; empty: the engine chooses
  std::size_t algorithms_ranks = 0;      // of sums of so many ranks; 0: of any
  int ranks_per_host = 0;  // > 0: pretend that each group of this many ranks is a host (for tests)
  bool trace = false;
  double stall_warn_s = 0;   // report a longer wait; 0: none
  std::string flight_path;   // file of the flight recorder; "": in memory only
  std::string abort_marker;  // see EndProcess
};

}  // namespace hvpipe
