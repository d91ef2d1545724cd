// Allocates and frees aligned host memory.
#include "base/aligned_buffer.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace hvpipe {

AlignedBuffer::AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
  void* pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
  if (pointer == nullptr)
    throw Error("Out of host memory: " + std::to_string(bytes) + " bytes were requested.");
  data_.reset(pointer);
}

void AlignedBuffer::Free::operator()(void* pointer) const { std::free(pointer); }

}  // namespace hvpipe
