// MPI's types and operators for all element types, and scaling.
#pragma once

#include <mpi.h>

#include <cstdint>

#include "named/call.h"

namespace hvpipe::named {

MPI_Datatype MpiType(Type type);
// Average is a sum. The half types have operators of their own, which compute in float32. So have the minimum
// and maximum of floating-point numbers, because MPI's lose NaN.
MPI_Op MpiOp(ReduceOp op, Type type);
// into[i] = into[i] op from[i], as MpiOp does.
void Reduce(ReduceOp op, Type type, void* into, const void* from, std::int64_t count);
// data[i] *= factor, in double precision for integers, which are then cut off, and in float32 for half types.
void ScaleNumbers(void* data, Type type, std::int64_t count, double factor);

// Divides integers, and cuts off what is left over. Returns whether the type is one of integers.
bool DivideIntegers(void* data, Type type, std::int64_t count, std::int64_t by);

// The state of Adasum for two vectors: result = of_a * a + of_b * b.
struct AdasumFactors {
  double of_a, of_b;
};
// Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 2.
AdasumFactors FactorsOf(const void* a, const void* b, Type type, std::int64_t count);
// a[i] = of_a * a[i] + of_b * b[i].
void Combine(void* a, const void* b, Type type, std::int64_t count, AdasumFactors factors);

}  // namespace hvpipe::named
