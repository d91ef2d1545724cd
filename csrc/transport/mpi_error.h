// Turns MPI error codes into exceptions.
#pragma once

#include <mpi.h>

#include "base/error.h"

namespace hvpipe {

// Throw an error with the text of `code` and of the call, unless `code` is MPI_SUCCESS.
void CheckMpi(int code, const char* call);

}  // namespace hvpipe

// Every MPI call goes through this macro. The error message names the call.
#define HVPIPE_MPI(call) ::hvpipe::CheckMpi((call), #call)
