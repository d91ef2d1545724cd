// Arithmetic on arrays of any element type: reductions over ranks, Adasum.
#pragma once

#include <cstdint>
#include <vector>

#include "named/call.h"

namespace hvpipe::named {

// out[i] = the reduction of parts[0][i], parts[1][i], ... of all ranks in this order, with the factors of the
// request. `out` may be one of the parts.
//
// float32 and float64 are scaled before and after a reduction in their own type. Half types are computed in
// float32 and rounded once. Integers are computed exactly, scaled in float64 and cut off; at the end they
// wrap round. NaN is the smallest and the largest number, and -0 is smaller than 0.
void ReduceParts(const Request& request, DType type, const std::vector<const void*>& parts, void* out,
                 std::int64_t count);

// The state of Adasum for two vectors: result = of_a * a + of_b * b.
struct AdasumFactors {
  double of_a, of_b;
};
// Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 2.
AdasumFactors FactorsOf(const void* a, const void* b, DType type, std::int64_t count);
// a[i] = of_a * a[i] + of_b * b[i].
void Combine(void* a, const void* b, DType type, std::int64_t count, AdasumFactors factors);

}  // namespace hvpipe::named
