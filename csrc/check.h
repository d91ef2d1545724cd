// Error type of the core and the gate that every MPI call passes through.
#pragma once

#include <mpi.h>

#include <stdexcept>
#include <string>

namespace hvpipe {

// What went wrong, so that the Python face can raise the matching exception.
enum class ErrorKind { kInternal, kMismatch, kDeadline, kPeer, kUsage };

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ErrorKind kind = ErrorKind::kInternal)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws with the text of `code` and of the call, unless it is MPI_SUCCESS.
void CheckMpi(int code, const char* call);

}  // namespace hvpipe

// One gate for every MPI call; the message names the call.
#define HVPIPE_MPI(call) ::hvpipe::CheckMpi((call), #call)
