// What all networks have in common.
#include "core/network.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace hvpipe {

bool Network::crowded() const {
  return static_cast<unsigned>(topology_.local_size) > std::thread::hardware_concurrency();
}

// A peer's message is missing: look often at first, since it may be the last one of a small bucket, then less
// and less. Keep looking often while a caller waits for a message, because then nothing else needs the core.
double Network::NapS(int idle_passes, bool caller_waits) const {
  const int most_growth = caller_waits ? 2 : 20;
  const double nap_s = options_.shortest_nap_s * std::pow(1.5, std::min(idle_passes, most_growth));
  return std::clamp(nap_s, options_.shortest_nap_s, options_.longest_nap_s);
}

}  // namespace hvpipe
