// Loops over arrays of any element type.
#include "named/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/half.h"
#include "base/vector_loops.h"

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
void WithType(DType type, const Act& act) {
  switch (type) {
    case DType::kBool:
    case DType::kUint8:
      return act(static_cast<std::uint8_t*>(nullptr));
    case DType::kInt8:
      return act(static_cast<std::int8_t*>(nullptr));
    case DType::kUint16:
      return act(static_cast<std::uint16_t*>(nullptr));
    case DType::kInt16:
      return act(static_cast<std::int16_t*>(nullptr));
    case DType::kInt32:
      return act(static_cast<std::int32_t*>(nullptr));
    case DType::kInt64:
      return act(static_cast<std::int64_t*>(nullptr));
    case DType::kFloat16:
      return act(static_cast<Float16*>(nullptr));
    case DType::kBFloat16:
      return act(static_cast<BFloat16*>(nullptr));
    case DType::kFloat32:
      return act(static_cast<float*>(nullptr));
    case DType::kFloat64:
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
void ReduceEach(void* into, const void* from, std::int64_t count) {
  auto* const a = static_cast<T*>(into);
  const auto* const b = static_cast<const T*>(from);
  for (std::int64_t i = 0; i < count; ++i) a[i] = Reduced(kOp, a[i], b[i]);
}

// into[i] = into[i] op from[i], in the type itself.
void Reduce(ReduceOp op, DType type, void* into, const void* from, std::int64_t count) {
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    switch (op) {
      case ReduceOp::kMin:
        return ReduceEach<T, ReduceOp::kMin>(into, from, count);
      case ReduceOp::kMax:
        return ReduceEach<T, ReduceOp::kMax>(into, from, count);
      case ReduceOp::kProduct:
        return ReduceEach<T, ReduceOp::kProduct>(into, from, count);
      default:
        return ReduceEach<T, ReduceOp::kSum>(into, from, count);
    }
  });
}

constexpr std::int64_t kBlock = 1024;

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

void ReduceHalves(const Request& request, DType type, const std::vector<const void*>& parts, char* out,
                  std::int64_t count) {
  const double by = request.op == ReduceOp::kAverage ? static_cast<double>(parts.size()) : 1;
  std::array<float, kBlock> total, next;
  for (std::int64_t start = 0; start < count; start += kBlock) {
    const auto n = static_cast<std::size_t>(std::min(count - start, kBlock));
    const std::size_t offset = static_cast<std::size_t>(start) * SizeOf(type);
    const auto load = [&](std::size_t part, float* to) {
      ScaleAndCast(static_cast<const char*>(parts[part]) + offset, type, to, DType::kFloat32, n,
                   request.prescale);
    };
    load(0, total.data());
    for (std::size_t part = 1; part < parts.size(); ++part) {
      load(part, next.data());
      for (std::size_t i = 0; i < n; ++i) total[i] = Reduced(request.op, total[i], next[i]);
    }
    ScaleAndCast(total.data(), DType::kFloat32, out + offset, type, n, request.postscale / by);
  }
}

void ScaleSum(const Request& request, DType type, std::size_t parts, void* out, std::int64_t count) {
  const double by = request.op == ReduceOp::kAverage ? static_cast<double>(parts) : 1;
  Scale(out, type, static_cast<std::size_t>(count), request.postscale / by);
}

// In the type itself, a block at a time if numbers must be scaled before.
void ReducePlain(const Request& request, DType type, std::vector<const void*> parts, char* out,
                 std::int64_t count) {
  const bool adds = request.op == ReduceOp::kSum || request.op == ReduceOp::kAverage;
  if (request.prescale == 1 && adds && IsFloating(type)) {
    SumInto(out, parts.data(), parts.size(), type, static_cast<std::size_t>(count));
    return ScaleSum(request, type, parts.size(), out, count);
  }
  std::vector<char> kept;  // of the part that `out` is, since the first part goes there
  if (const auto same = std::find(parts.begin() + 1, parts.end(), out); same != parts.end()) {
    kept.assign(out, out + static_cast<std::size_t>(count) * SizeOf(type));
    *same = kept.data();
  }
  if (request.prescale == 1) {
    if (out != parts.front()) std::memcpy(out, parts.front(), static_cast<std::size_t>(count) * SizeOf(type));
    for (std::size_t part = 1; part < parts.size(); ++part) Reduce(request.op, type, out, parts[part], count);
  } else {
    std::array<double, kBlock> scaled;  // aligned for every type
    for (std::int64_t start = 0; start < count; start += kBlock) {
      const std::int64_t n = std::min(count - start, kBlock);
      const std::size_t offset = static_cast<std::size_t>(start) * SizeOf(type);
      for (std::size_t part = 0; part < parts.size(); ++part) {
        void* const to = part == 0 ? static_cast<void*>(out + offset) : scaled.data();
        ScaleAndCast(static_cast<const char*>(parts[part]) + offset, type, to, type,
                     static_cast<std::size_t>(n), request.prescale);
        if (part > 0) Reduce(request.op, type, out + offset, to, n);
      }
    }
  }
  if (IsFloating(type)) ScaleSum(request, type, parts.size(), out, count);
}

// Whether a result in the tensor's own type would depend on numbers between that the type cannot hold: a sum
// of half types is rounded at each rank, an average of integers wraps before it is divided.
bool NeedsWiderType(const Request& request, DType type) {
  const bool scales = request.prescale != 1 || request.postscale != 1;
  if (!IsFloating(type)) return scales || request.op == ReduceOp::kAverage;
  return IsHalf(type) && (scales || (request.op != ReduceOp::kMin && request.op != ReduceOp::kMax));
}

}  // namespace

void ReduceParts(const Request& request, DType type, const std::vector<const void*>& parts, void* out,
                 std::int64_t count) {
  if (count == 0) return;
  auto* const to = static_cast<char*>(out);
  if (!NeedsWiderType(request, type)) return ReducePlain(request, type, parts, to, count);
  if (IsHalf(type)) return ReduceHalves(request, type, parts, to, count);
  WithType(type, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if constexpr (std::is_integral_v<T>) ReduceIntegers(request, parts, static_cast<T*>(out), count);
  });
}

AdasumFactors FactorsOf(const void* a, const void* b, DType type, std::int64_t count) {
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

void Combine(void* a, const void* b, DType type, std::int64_t count, AdasumFactors factors) {
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
