// The element types of gradients and arrays. kInt8 is what compressed gradients travel as, in buckets only.
#pragma once

#include <cstddef>

namespace hvpipe {

enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3, kInt8 = 4 };

// Bytes of one element.
std::size_t SizeOf(DType dtype);
// "float32", "float64", "float16", "bfloat16" or "int8".
const char* NameOf(DType dtype);

}  // namespace hvpipe
