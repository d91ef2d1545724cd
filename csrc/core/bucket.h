// A fused gradient buffer and the vectorised loops that fill, reduce and empty it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hvpipe {

enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };

std::size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);

// memcpy for buffers that pass through the cache. On AMD's Zen 3 and 4 the C library's memcpy (rep movsb)
// falls to 1 to 3 GB/s where source and destination lie a few bytes apart within a page, and a large NumPy
// array begins 16 bytes after a page's begin (glibc bug 30994).
void Copy(void* dst, const void* src, std::size_t bytes);

// The same into memory that another core has read since. Of lines that it writes whole, rep movsb need not
// first bring what is in them: 1.6 to 3 times as fast here (Zen 5), where source and destination are aligned
// alike.
void CopyToPeers(void* dst, const void* src, std::size_t bytes);

// dst[i] = cast(src[i] * scale). Half types are scaled in float32. A NaN stays a NaN.
void PackScaled(const void* src, DType src_type, void* dst, DType dst_type, std::size_t count, double scale);

// dst[i] = cast(src[i]).
inline void Unpack(const void* src, DType src_type, void* dst, DType dst_type, std::size_t count) {
  PackScaled(src, src_type, dst, dst_type, count, 1.0);
}

// dst[i] += src[i]; half types are added in float32 and rounded once.
void AddInto(void* dst, const void* src, DType dtype, std::size_t count);

// dst[i] = ((srcs[0][i] + srcs[1][i]) + srcs[2][i]) + ..., always in this order, so that every rank that
// does it gets the same bits. Half types are summed in float32 and rounded once. dst may be one of srcs.
void SumInto(void* dst, const void* const* srcs, std::size_t sources, DType dtype, std::size_t count);

// buffer[i] *= scale.
void Scale(void* buffer, DType dtype, std::size_t count, double scale);

// What every tensor inside a fused buffer is aligned to, as TensorFlow wants it: a cache line.
constexpr std::size_t kAlignment = 64;

// Memory aligned to a cache line, freed with the owner.
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

// Where the tensors of one bucket lie inside its fused buffer.
struct BucketLayout {
  std::string name;                  // for messages and the trace: its first and last tensor
  DType tensor_type;                 // type of the gradients
  DType wire_type;                   // type of the fused buffer: differs under compression
  std::vector<std::size_t> counts;   // elements of each tensor, in order
  std::vector<std::size_t> offsets;  // first element of each tensor inside the buffer
  std::size_t count = 0;             // elements of the buffer, with the gaps that align the tensors
  int priority = 0;                  // 0 is needed first by the next forward
  std::size_t row = 0;               // elements of a row, of a table whose rows that are zero do not travel

  BucketLayout(std::string bucket_name, DType tensor, DType wire, std::vector<std::size_t> tensor_counts,
               int bucket_priority);
  std::size_t bytes() const { return count * SizeOf(wire_type); }
  bool compressed() const { return wire_type != tensor_type; }
};

}  // namespace hvpipe
