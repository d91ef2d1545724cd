// Named collectives over TCP sockets.
#pragma once

#include <memory>

#include "collectives/socket_mesh.h"
#include "named/links.h"

namespace hvpipe::named {

// Collective. A collective in which nothing moves for `limit_s` seconds ends with an error.
std::unique_ptr<Links> MakeSocketLinks(std::shared_ptr<SocketMesh> mesh, double limit_s);

}  // namespace hvpipe::named
