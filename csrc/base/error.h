// The exception of the C++ code.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

namespace hvpipe {

// The kind decides which Python exception is raised. kLost is a peer's, of an MPI that does not know which.
enum class ErrorKind { kInternal, kMismatch, kDeadline, kPeer, kUsage, kLost };

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ErrorKind kind = ErrorKind::kInternal)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Any exception as an Error, for the engine to end with: also one of the standard library, such as
// std::bad_alloc.
inline Error ErrorOf(const std::exception& failure) {
  if (const auto* const known = dynamic_cast<const Error*>(&failure)) return *known;
  if (dynamic_cast<const std::bad_alloc*>(&failure) != nullptr)
    return Error("Out of host memory on this rank (std::bad_alloc).");
  return Error(failure.what());
}

}  // namespace hvpipe
