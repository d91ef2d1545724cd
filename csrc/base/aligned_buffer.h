// Host memory aligned to a cache line.
#pragma once

#include <cstddef>
#include <memory>

namespace hvpipe {

// Alignment in bytes of every tensor inside a fused buffer: a cache line, as TensorFlow requires.
constexpr std::size_t kAlignment = 64;

// Owns aligned memory and frees it in its destructor.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes);
  void* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* pointer) const;
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

}  // namespace hvpipe
