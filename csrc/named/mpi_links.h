// Named collectives over MPI.
#pragma once

#include <mpi.h>

#include <memory>

#include "named/links.h"

namespace hvpipe::named {

// Collective over `world`, which is duplicated.
std::unique_ptr<Links> MakeMpiLinks(MPI_Comm world);

}  // namespace hvpipe::named
