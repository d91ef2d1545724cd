// Turns MPI return codes into exceptions that name the failing call.
#include "transport/mpi_error.h"

namespace hvpipe {

void CheckMpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  throw Error(std::string("MPI call failed: ") + call + ": " +
                  (length > 0 ? std::string(text, static_cast<std::size_t>(length)) : "unknown error code"),
              ErrorKind::kPeer);
}

}  // namespace hvpipe
