// The C++ types of a cast, for stand-ins that run the device's kernels on the CPU.
#pragma once

#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "gpu/cast_tile.h"

namespace hvpipe {

// Call visit(From{}, To{}) with the C++ types of two dtypes.
template <typename Visit>
void WithTypes(DType from, DType to, const Visit& visit) {
  if (from == DType::kFloat64 && to == DType::kFloat64) return visit(double{}, double{});
  const auto none = [&] {
    return Error("internal: no cast from " + std::string(NameOf(from)) + " to " + NameOf(to));
  };
  const auto with_from = [&](auto source) {
    if (to == DType::kFloat32) return visit(source, float{});
    if (to == DType::kFloat16) return visit(source, Half{});
    if (to == DType::kBFloat16) return visit(source, BFloat16{});
    throw none();
  };
  if (from == DType::kFloat32) return with_from(float{});
  if (from == DType::kFloat16) return with_from(Half{});
  if (from == DType::kBFloat16) return with_from(BFloat16{});
  throw none();
}

}  // namespace hvpipe
