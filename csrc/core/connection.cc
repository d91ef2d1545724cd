// Makes the network and the route of each back end.
#include "core/connection.h"

#include "core/communicators.h"
#include "core/delegated_network.h"

namespace hvpipe {

Connect OverMpi(MPI_Comm world) {
  return [world](const EngineOptions& options, Counters& counters) {
    auto network = std::make_unique<Communicators>(world, options, counters);
    auto route = std::make_unique<MpiRoute>(*network, counters);
    return Connection{std::move(network), std::move(route)};
  };
}

Connect OverCalls(std::shared_ptr<named::CallService> service, const Topology& topology) {
  return [service = std::move(service), topology](const EngineOptions& options, Counters& counters) {
    auto network = std::make_unique<DelegatedNetwork>(service, topology, options, counters);
    auto route = std::make_unique<DelegatedRoute>(*network);
    return Connection{std::move(network), std::move(route)};
  };
}

}  // namespace hvpipe
