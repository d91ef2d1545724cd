// Checks one rank's call before the others hear of it.
#pragma once

#include <string>
#include <vector>

#include "named/call.h"

namespace hvpipe::named {

// Complete the request of `rank`, and return why this rank cannot take part; empty: it can. `ranks` are those
// of the request's process set, in ascending order; none if there is no such set. Throws if the call does not
// concern the other ranks.
std::string Check(Request& request, const std::vector<int>& ranks, int rank);

}  // namespace hvpipe::named
