// The types of array elements.
#pragma once

#include <cstddef>

namespace hvpipe {

// Gradients and arrays of the engine are of the floating-point types, or of int8 if they are compressed.
// Calls by name take all types.
enum class DType : int {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kBool,
  kUint8,
  kUint16,
  kInt16,
  kInt32,
  kInt64,
};

// Bytes of one element.
std::size_t SizeOf(DType dtype);
// Such as "float32".
const char* NameOf(DType dtype);

inline bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }
inline bool IsFloating(DType dtype) {
  return IsHalf(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

}  // namespace hvpipe
