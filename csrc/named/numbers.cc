// Arithmetic on arrays of any element type.
#include "named/numbers.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/half.h"
#include "core/mpi_error.h"

namespace hvpipe::named {
namespace {

struct Float16 {
  std::uint16_t bits;
  explicit operator float() const { return HalfToFloatScalar(bits); }
  static Float16 Of(float value) { return {FloatToHalfScalar(value)}; }
};

struct BFloat16 {
  std::uint16_t bits;
  explicit operator float() const { return BitsToFloat(static_cast<std::uint32_t>(bits) << 16); }
  static BFloat16 Of(float value) { return {FloatToBFloat16(value)}; }
};

// The type to compute in, and how to get a number back.
template <typename T>
struct Wide {
  using type = double;
  static T Narrow(double value) { return static_cast<T>(value); }
};
template <>
struct Wide<float> {
  using type = float;
  static float Narrow(float value) { return value; }
};
template <>
struct Wide<Float16> {
  using type = float;
  static Float16 Narrow(float value) { return Float16::Of(value); }
};
template <>
struct Wide<BFloat16> {
  using type = float;
  static BFloat16 Narrow(float value) { return BFloat16::Of(value); }
};

// Call `act` with a null pointer of the element type.
template <typename Act>
void WithType(Type type, const Act& act) {
  switch (type) {
    case Type::kBool:
    case Type::kUint8:
      return act(static_cast<std::uint8_t*>(nullptr));
    case Type::kInt8:
      return act(static_cast<std::int8_t*>(nullptr));
    case Type::kUint16:
      return act(static_cast<std::uint16_t*>(nullptr));
    case Type::kInt16:
      return act(static_cast<std::int16_t*>(nullptr));
    case Type::kInt32:
      return act(static_cast<std::int32_t*>(nullptr));
    case Type::kInt64:
      return act(static_cast<std::int64_t*>(nullptr));
    case Type::kFloat16:
      return act(static_cast<Float16*>(nullptr));
    case Type::kBFloat16:
      return act(static_cast<BFloat16*>(nullptr));
    case Type::kFloat32:
      return act(static_cast<float*>(nullptr));
    case Type::kFloat64:
      return act(static_cast<double*>(nullptr));
  }
}

// Sums and products of integers wrap round, as MPI's do. NaN is the smallest and the largest number, as in
// NumPy and TensorFlow, on whatever rank it is.
template <typename T>
T Reduced(ReduceOp op, T a, T b) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return T::Of(Reduced(op, static_cast<float>(a), static_cast<float>(b)));
  } else {
    if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
      if (a != a || b != b) return a != a ? a : b;
      return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
    }
    if constexpr (std::is_integral_v<T>) {
      const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
      return static_cast<T>(op == ReduceOp::kProduct ? x * y : x + y);
    } else {
      return op == ReduceOp::kProduct ? a * b : a + b;
    }
  }
}

template <typename T, ReduceOp kOp>
void ReduceEach(void* in, void* in_out, int* count, MPI_Datatype* /*type*/) {
  const auto* const a = static_cast<const T*>(in);
  auto* const b = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) b[i] = Reduced(kOp, a[i], b[i]);
}

template <typename T, ReduceOp kOp>
MPI_Op OwnOp() {
  static const MPI_Op made = [] {
    MPI_Op op = MPI_OP_NULL;
    HVPIPE_MPI(MPI_Op_create(&ReduceEach<T, kOp>, 1, &op));
    return op;
  }();
  return made;
}

template <typename T>
MPI_Op OwnOpOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return OwnOp<T, ReduceOp::kMin>();
    case ReduceOp::kMax:
      return OwnOp<T, ReduceOp::kMax>();
    case ReduceOp::kProduct:
      return OwnOp<T, ReduceOp::kProduct>();
    default:
      return OwnOp<T, ReduceOp::kSum>();
  }
}

}  // namespace

MPI_Datatype MpiType(Type type) {
  switch (type) {
    case Type::kBool:
    case Type::kUint8:
      return MPI_UINT8_T;
    case Type::kInt8:
      return MPI_INT8_T;
    case Type::kUint16:
    case Type::kFloat16:
    case Type::kBFloat16:
      return MPI_UINT16_T;
    case Type::kInt16:
      return MPI_INT16_T;
    case Type::kInt32:
      return MPI_INT32_T;
    case Type::kInt64:
      return MPI_INT64_T;
    case Type::kFloat32:
      return MPI_FLOAT;
    case Type::kFloat64:
      return MPI_DOUBLE;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op MpiOp(ReduceOp op, Type type) {
  const bool compares = op == ReduceOp::kMin || op == ReduceOp::kMax;
  if (type == Type::kFloat16) return OwnOpOf<Float16>(op);
  if (type == Type::kBFloat16) return OwnOpOf<BFloat16>(op);
  if (type == Type::kFloat32 && compares) return OwnOpOf<float>(op);
  if (type == Type::kFloat64 && compares) return OwnOpOf<double>(op);
  switch (op) {
    case ReduceOp::kMin:
      return MPI_MIN;
    case ReduceOp::kMax:
      return MPI_MAX;
    case ReduceOp::kProduct:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

void Reduce(ReduceOp op, Type type, void* into, const void* from, std::int64_t count) {
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    auto* const a = static_cast<T*>(into);
    const auto* const b = static_cast<const T*>(from);
    for (std::int64_t i = 0; i < count; ++i) a[i] = Reduced(op, a[i], b[i]);
  });
}

void ScaleNumbers(void* data, Type type, std::int64_t count, double factor) {
  if (factor == 1) return;
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using W = typename Wide<T>::type;
    T* const numbers = static_cast<T*>(data);
    const W wide = static_cast<W>(factor);
    for (std::int64_t i = 0; i < count; ++i) numbers[i] = Wide<T>::Narrow(static_cast<W>(numbers[i]) * wide);
  });
}

bool DivideIntegers(void* data, Type type, std::int64_t count, std::int64_t by) {
  bool divided = false;
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if constexpr (std::is_integral_v<T>) {
      T* const numbers = static_cast<T*>(data);
      for (std::int64_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<T>(static_cast<std::int64_t>(numbers[i]) / by);
      }
      divided = true;
    }
  });
  return divided;
}

AdasumFactors FactorsOf(const void* a, const void* b, Type type, std::int64_t count) {
  double dot = 0, a_square = 0, b_square = 0;
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using W = typename Wide<T>::type;
    const auto* const as = static_cast<const T*>(a);
    const auto* const bs = static_cast<const T*>(b);
    for (std::int64_t i = 0; i < count; ++i) {
      const double x = static_cast<double>(static_cast<W>(as[i]));
      const double y = static_cast<double>(static_cast<W>(bs[i]));
      dot += x * y;
      a_square += x * x;
      b_square += y * y;
    }
  });
  return {a_square > 0 ? 1 - dot / (2 * a_square) : 1, b_square > 0 ? 1 - dot / (2 * b_square) : 1};
}

void Combine(void* a, const void* b, Type type, std::int64_t count, AdasumFactors factors) {
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using W = typename Wide<T>::type;
    auto* const as = static_cast<T*>(a);
    const auto* const bs = static_cast<const T*>(b);
    for (std::int64_t i = 0; i < count; ++i) {
      const double x = static_cast<double>(static_cast<W>(as[i]));
      const double y = static_cast<double>(static_cast<W>(bs[i]));
      as[i] = Wide<T>::Narrow(static_cast<W>(factors.of_a * x + factors.of_b * y));
    }
  });
}

}  // namespace hvpipe::named
