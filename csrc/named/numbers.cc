// Arithmetic on arrays of any element type.
#include "named/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/half.h"
#include "core/mpi_error.h"
#include "core/vector_loops.h"

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

// NaN is the smallest and the largest number, as in NumPy and TensorFlow, on whatever rank it is. -0 is
// smaller than 0. So the order of the ranks does not matter, and all get the same bits.
template <typename T>
T Extreme(ReduceOp op, T a, T b) {
  if constexpr (!std::is_integral_v<T>) {
    if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) == (op == ReduceOp::kMin) ? a : b;
  }
  return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
}

// Sums and products of integers wrap round.
template <typename T>
T Reduced(ReduceOp op, T a, T b) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return T::Of(Reduced(op, static_cast<float>(a), static_cast<float>(b)));
  } else {
    if (op == ReduceOp::kMin || op == ReduceOp::kMax) return Extreme(op, a, b);
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
  if (!compares && (type == Type::kFloat32 || type == Type::kFloat64)) {
    return op == ReduceOp::kProduct ? MPI_PROD : MPI_SUM;
  }
  MPI_Op own = MPI_OP_NULL;
  WithType(type, [&](auto* typed) { own = OwnOpOf<std::remove_pointer_t<decltype(typed)>>(op); });
  return own;
}

void Reduce(ReduceOp op, Type type, void* into, const void* from, std::int64_t count) {
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    auto* const a = static_cast<T*>(into);
    const auto* const b = static_cast<const T*>(from);
    for (std::int64_t i = 0; i < count; ++i) a[i] = Reduced(op, a[i], b[i]);
  });
}

namespace {

constexpr std::int64_t kBlock = 1024;

DType CoreTypeOf(Type type) {
  switch (type) {
    case Type::kFloat16:
      return DType::kFloat16;
    case Type::kBFloat16:
      return DType::kBFloat16;
    case Type::kFloat64:
      return DType::kFloat64;
    default:
      return DType::kFloat32;
  }
}

bool IsHalf(Type type) { return type == Type::kFloat16 || type == Type::kBFloat16; }

// What is left of a number is cut off. Numbers that no int64 holds become the nearest one, NaN becomes 0.
std::int64_t CutOff(double value) {
  constexpr double kEnd = 9223372036854775808.0;  // 2^63
  if (value >= kEnd) return std::numeric_limits<std::int64_t>::max();
  if (value < -kEnd) return std::numeric_limits<std::int64_t>::min();
  return value != value ? 0 : static_cast<std::int64_t>(value);
}

__extension__ using Int128 = __int128;

template <typename T>
void ReduceIntegers(const Request& request, const std::vector<const void*>& parts, T* out,
                    std::int64_t count) {
  using Wider = std::conditional_t<sizeof(T) == 8, Int128, std::int64_t>;
  const auto scaled = [&](std::size_t part, std::int64_t i) -> Wider {
    const T given = static_cast<const T*>(parts[part])[i];
    return request.prescale == 1 ? static_cast<Wider>(given)
                                 : static_cast<Wider>(CutOff(static_cast<double>(given) * request.prescale));
  };
  const double by = request.op == ReduceOp::kAverage ? static_cast<double>(parts.size()) : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    Wider total = scaled(0, i);
    for (std::size_t part = 1; part < parts.size(); ++part) {
      const Wider next = scaled(part, i);
      if (request.op == ReduceOp::kMin) {
        total = std::min(total, next);
      } else if (request.op == ReduceOp::kMax) {
        total = std::max(total, next);
      } else if (request.op == ReduceOp::kProduct) {
        const auto product = static_cast<std::uint64_t>(total) * static_cast<std::uint64_t>(next);
        total = static_cast<std::int64_t>(product);
      } else {
        total += next;
      }
    }
    // Without a factor the division is exact, also above 2^53.
    out[i] =
        static_cast<T>(request.postscale == 1 ? static_cast<std::int64_t>(total / static_cast<Wider>(by))
                                              : CutOff(static_cast<double>(total) * request.postscale / by));
  }
}

void ReduceHalves(const Request& request, Type type, const std::vector<const void*>& parts, char* out,
                  std::int64_t count) {
  const DType half = CoreTypeOf(type);
  const double by = request.op == ReduceOp::kAverage ? static_cast<double>(parts.size()) : 1;
  std::array<float, kBlock> total, next;
  for (std::int64_t start = 0; start < count; start += kBlock) {
    const auto n = static_cast<std::size_t>(std::min(count - start, kBlock));
    const std::size_t offset = static_cast<std::size_t>(start) * SizeOf(type);
    const auto load = [&](std::size_t part, float* to) {
      ScaleAndCast(static_cast<const char*>(parts[part]) + offset, half, to, DType::kFloat32, n,
                   request.prescale);
    };
    load(0, total.data());
    for (std::size_t part = 1; part < parts.size(); ++part) {
      load(part, next.data());
      for (std::size_t i = 0; i < n; ++i) total[i] = Reduced(request.op, total[i], next[i]);
    }
    ScaleAndCast(total.data(), DType::kFloat32, out + offset, half, n, request.postscale / by);
  }
}

}  // namespace

bool IsFloating(Type type) { return IsHalf(type) || type == Type::kFloat32 || type == Type::kFloat64; }

bool NeedsWiderType(const Request& request, Type type) {
  if (request.op == ReduceOp::kAdasum) return false;
  const bool scales = request.prescale != 1 || request.postscale != 1;
  if (!IsFloating(type)) return scales || request.op == ReduceOp::kAverage;
  return IsHalf(type) && (scales || (request.op != ReduceOp::kMin && request.op != ReduceOp::kMax));
}

void ReduceParts(const Request& request, Type type, const std::vector<const void*>& parts, void* out,
                 std::int64_t count) {
  if (IsHalf(type)) return ReduceHalves(request, type, parts, static_cast<char*>(out), count);
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if constexpr (std::is_integral_v<T>) ReduceIntegers(request, parts, static_cast<T*>(out), count);
  });
}

void ScaleNumbers(void* data, Type type, std::int64_t count, double factor) {
  Scale(data, CoreTypeOf(type), static_cast<std::size_t>(count), factor);
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
