// Sizes and names of the element types.
#include "base/dtype.h"

namespace hvpipe {
namespace {

struct Facts {
  std::size_t bytes;
  const char* name;
};

// In the order of DType.
constexpr Facts kFacts[] = {
    {4, "float32"}, {8, "float64"}, {2, "float16"}, {2, "bfloat16"}, {1, "int8"},  {1, "bool"},
    {1, "uint8"},   {2, "uint16"},  {2, "int16"},   {4, "int32"},    {8, "int64"},
};

}  // namespace

std::size_t SizeOf(DType dtype) { return kFacts[static_cast<int>(dtype)].bytes; }

const char* NameOf(DType dtype) { return kFacts[static_cast<int>(dtype)].name; }

}  // namespace hvpipe
