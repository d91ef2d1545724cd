// The element types of gradients and arrays.
#pragma once

#include <cstddef>

namespace hvpipe {

enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };

// Bytes of one element.
std::size_t SizeOf(DType dtype);
// "float32", "float64", "float16" or "bfloat16".
const char* NameOf(DType dtype);

}  // namespace hvpipe
