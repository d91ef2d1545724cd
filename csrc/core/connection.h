// Chooses what connects the ranks of an engine.
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>

#include "core/network.h"
#include "core/reduce.h"
#include "core/telemetry.h"
#include "named/call_service.h"

namespace hvpipe {

struct Connection {
  std::unique_ptr<Network> network;
  std::unique_ptr<AllReduceRoute> route;
};

// Joins the ranks. Collective. The counters outlive the connection.
using Connect = std::function<Connection(const EngineOptions& options, Counters& counters)>;

// MPI, between the ranks of `world`, which is duplicated. MPI must allow calls from several threads.
Connect OverMpi(MPI_Comm world);
// The calls of another library, such as Horovod.
Connect OverCalls(std::shared_ptr<named::CallService> service, const Topology& topology);

}  // namespace hvpipe
