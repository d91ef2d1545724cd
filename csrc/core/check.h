// What turns MPI's error codes into exceptions.
#pragma once

#include <mpi.h>

#include "core/error.h"

namespace hvpipe {

// Throws with the text of `code` and of the call, unless it is MPI_SUCCESS.
void CheckMpi(int code, const char* call);

}  // namespace hvpipe

// One gate for every MPI call; the message names the call.
#define HVPIPE_MPI(call) ::hvpipe::CheckMpi((call), #call)
