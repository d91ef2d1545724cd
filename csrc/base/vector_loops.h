// Vectorised loops over arrays in host memory: copy, scale, cast, add, sum.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hvpipe {

// Copy arrays that stay in the cache. Use instead of memcpy: on AMD Zen 3 and 4, glibc's memcpy (rep movsb)
// drops to 1 to 3 GB/s if source and destination are a few bytes apart within a page (glibc bug 30994). Large
// NumPy arrays begin 16 bytes into a page, so this happens often.
void Copy(void* dst, const void* src, std::size_t bytes);

// Copy into memory that another core has read since this core last wrote it. rep movsb writes whole cache
// lines without fetching them first: 1.6 to 3 times as fast on Zen 5, if source and destination are aligned
// alike.
void CopyToPeers(void* dst, const void* src, std::size_t bytes);

// dst[i] = cast(src[i] * scale). Half types are scaled in float32. A NaN stays a NaN. int8 is only copied.
void ScaleAndCast(const void* src, DType src_type, void* dst, DType dst_type, std::size_t count,
                  double scale);

// dst[i] = cast(src[i]).
inline void Cast(const void* src, DType src_type, void* dst, DType dst_type, std::size_t count) {
  ScaleAndCast(src, src_type, dst, dst_type, count, 1.0);
}

// dst[i] += src[i]. Half types are added in float32 and rounded once. Sums of int8 must fit into int8.
void AddInto(void* dst, const void* src, DType dtype, std::size_t count);

// dst[i] = ((srcs[0][i] + srcs[1][i]) + srcs[2][i]) + ... The order is fixed, so every rank gets the same
// bits. Half types are summed in float32 and rounded once, int8 as in AddInto. dst may be one of srcs.
void SumInto(void* dst, const void* const* srcs, std::size_t sources, DType dtype, std::size_t count);

// buffer[i] *= scale.
void Scale(void* buffer, DType dtype, std::size_t count, double scale);

}  // namespace hvpipe
