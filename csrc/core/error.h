// The exception of the C++ code.
#pragma once

#include <stdexcept>
#include <string>

namespace hvpipe {

// The kind decides which Python exception is raised.
enum class ErrorKind { kInternal, kMismatch, kDeadline, kPeer, kUsage };

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ErrorKind kind = ErrorKind::kInternal)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace hvpipe
