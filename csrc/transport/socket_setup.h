// The TCP connections between all ranks, as hvpipe/world/tcp_setup.py has made them.
#pragma once

#include <vector>

#include "transport/text_messages.h"

namespace hvpipe {

// One connection to each other rank.
struct Sockets {
  int rank = 0;
  std::vector<int> connected;          // by rank; -1 for this rank
  std::vector<ProcessName> processes;  // by rank
};

// Let a connection carry messages: it blocks nobody, and sends at once.
void Tune(int socket);

}  // namespace hvpipe
