// Turns MPI return codes into exceptions that name the failing call.
#include "transport/mpi_error.h"

namespace hvpipe {

void CheckMpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  const std::string why =
      length > 0 ? std::string(text, static_cast<std::size_t>(length)) : "unknown error code";
  // Of ULFM, the fault tolerance of MPI: a rank has ended, or another rank has noticed that.
  const bool lost = why.find("PROC_FAILED") != std::string::npos || why.find("REVOKED") != std::string::npos;
  throw Error((lost ? "A rank was lost: " : "MPI call failed: ") + std::string(call) + ": " + why,
              lost ? ErrorKind::kLost : ErrorKind::kPeer);
}

}  // namespace hvpipe
