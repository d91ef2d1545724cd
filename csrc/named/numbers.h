// MPI's types and operators for all element types, and scaling.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "named/call.h"

namespace hvpipe::named {

MPI_Datatype MpiType(Type type);
// Average is a sum. Only sums and products of float32 and float64 are MPI's own: its minimum and maximum lose
// NaN, Open MPI's sums of short integers saturate in places, and MPI knows no half types.
MPI_Op MpiOp(ReduceOp op, Type type);
// into[i] = into[i] op from[i], as MpiOp does.
void Reduce(ReduceOp op, Type type, void* into, const void* from, std::int64_t count);

bool IsFloating(Type type);
// Whether a result in the tensor's own type would depend on numbers between that the type cannot hold: a sum
// of half types is rounded at each rank, an average of integers wraps before it is divided.
bool NeedsWiderType(const Request& request, Type type);
// out[i] = the reduction of parts[0][i], parts[1][i], ... of all ranks, with the factors of the request, for
// types that NeedsWiderType. Half types are computed in float32 and rounded once. Integers are computed
// exactly, scaled in float64 and cut off; at the end they wrap round. `out` may be one of the parts.
void ReduceParts(const Request& request, Type type, const std::vector<const void*>& parts, void* out,
                 std::int64_t count);
// data[i] *= factor, for floating-point numbers; half types in float32.
void ScaleNumbers(void* data, Type type, std::int64_t count, double factor);

// The state of Adasum for two vectors: result = of_a * a + of_b * b.
struct AdasumFactors {
  double of_a, of_b;
};
// Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 2.
AdasumFactors FactorsOf(const void* a, const void* b, Type type, std::int64_t count);
// a[i] = of_a * a[i] + of_b * b[i].
void Combine(void* a, const void* b, Type type, std::int64_t count, AdasumFactors factors);

}  // namespace hvpipe::named
