// The loops that pack, cast, scale and sum gradients, vectorised for AVX-512, AVX2 and plain x86.
#include "base/vector_loops.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/half.h"
#include "base/vectorised.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace hvpipe {
namespace {

constexpr std::size_t kBlock = 1024;  // elements of the float32 scratch array for half types

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) void HalfToFloatF16c(const std::uint16_t* src, float* dst,
                                                         std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  }
  for (; i < count; ++i) dst[i] = HalfToFloatScalar(src[i]);
}

__attribute__((target("avx,f16c"))) void FloatToHalfF16c(const float* src, std::uint16_t* dst,
                                                         std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i) dst[i] = FloatToHalfScalar(src[i]);
}

bool HasF16c() {
  static const bool has = __builtin_cpu_supports("f16c") != 0;
  return has;
}
#endif

void HalfToFloat(const std::uint16_t* src, float* dst, std::size_t count) {
#if defined(__x86_64__)
  if (HasF16c()) return HalfToFloatF16c(src, dst, count);
#endif
  for (std::size_t i = 0; i < count; ++i) dst[i] = HalfToFloatScalar(src[i]);
}

void FloatToHalf(const float* src, std::uint16_t* dst, std::size_t count) {
#if defined(__x86_64__)
  if (HasF16c()) return FloatToHalfF16c(src, dst, count);
#endif
  for (std::size_t i = 0; i < count; ++i) dst[i] = FloatToHalfScalar(src[i]);
}

HVPIPE_VECTORISED void BFloat16ToFloat(const std::uint16_t* src, float* dst, std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(src[i]) << 16;
    std::memcpy(dst + i, &bits, sizeof bits);
  }
}

HVPIPE_VECTORISED void FloatToBFloat16s(const float* src, std::uint16_t* dst, std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = FloatToBFloat16(src[i]);
}

HVPIPE_VECTORISED void ScaleFloat(const float* src, float* dst, std::size_t count, float scale) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = src[i] * scale;
}

HVPIPE_VECTORISED void ScaleDouble(const double* src, double* dst, std::size_t count, double scale) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = src[i] * scale;
}

HVPIPE_VECTORISED void AddFloat(float* dst, const float* src, std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}

HVPIPE_VECTORISED void AddDouble(double* dst, const double* src, std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}

// The sums of whoever compressed the numbers fit into int8
// (hvpipe/keras/data_parallel/gradient_compressors.py).
HVPIPE_VECTORISED void AddInt8(std::uint8_t* dst, const std::uint8_t* src, std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = static_cast<std::uint8_t>(dst[i] + src[i]);
}

using Vector = long long __attribute__((vector_size(32), aligned(1), may_alias));

HVPIPE_VECTORISED void CopyVectors(char* dst, const char* src, std::size_t vectors) {
  auto* to = reinterpret_cast<Vector*>(dst);
  const auto* from = reinterpret_cast<const Vector*>(src);
  for (std::size_t i = 0; i < vectors; ++i) to[i] = from[i];
}

HVPIPE_VECTORISED void Sum2Float(float* dst, const float* a, const float* b, std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = a[i] + b[i];
}

HVPIPE_VECTORISED void Sum3Float(float* dst, const float* a, const float* b, const float* c,
                                 std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = (a[i] + b[i]) + c[i];
}

HVPIPE_VECTORISED void Sum4Float(float* dst, const float* a, const float* b, const float* c, const float* d,
                                 std::size_t count) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) dst[i] = ((a[i] + b[i]) + c[i]) + d[i];
}

// Read `count` elements of a float32 or half array as float32.
void LoadFloat(const void* src, DType dtype, float* dst, std::size_t count) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(dst, src, count * sizeof(float));
      return;
    case DType::kFloat16:
      return HalfToFloat(static_cast<const std::uint16_t*>(src), dst, count);
    case DType::kBFloat16:
      return BFloat16ToFloat(static_cast<const std::uint16_t*>(src), dst, count);
    default:
      throw Error("internal: " + std::string(NameOf(dtype)) + " has no float32 path");
  }
}

void StoreFloat(const float* src, void* dst, DType dtype, std::size_t count) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(dst, src, count * sizeof(float));
      return;
    case DType::kFloat16:
      return FloatToHalf(src, static_cast<std::uint16_t*>(dst), count);
    case DType::kBFloat16:
      return FloatToBFloat16s(src, static_cast<std::uint16_t*>(dst), count);
    default:
      throw Error("internal: " + std::string(NameOf(dtype)) + " has no float32 path");
  }
}

const char* At(const void* base, DType dtype, std::size_t element) {
  return static_cast<const char*>(base) + element * SizeOf(dtype);
}

char* At(void* base, DType dtype, std::size_t element) {
  return static_cast<char*>(base) + element * SizeOf(dtype);
}

void SumFloat(float* dst, const void* const* srcs, std::size_t sources, std::size_t count) {
  const auto source = [&](std::size_t k) { return static_cast<const float*>(srcs[k]); };
  if (sources == 2) return Sum2Float(dst, source(0), source(1), count);
  if (sources == 3) return Sum3Float(dst, source(0), source(1), source(2), count);
  if (sources == 4) return Sum4Float(dst, source(0), source(1), source(2), source(3), count);
  float block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = count - first < kBlock ? count - first : kBlock;
    std::memcpy(block, source(0) + first, n * sizeof(float));
    for (std::size_t k = 1; k < sources; ++k) AddFloat(block, source(k) + first, n);
    std::memcpy(dst + first, block, n * sizeof(float));
  }
}

void SumDouble(double* dst, const void* const* srcs, std::size_t sources, std::size_t count) {
  double block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = count - first < kBlock ? count - first : kBlock;
    std::memcpy(block, static_cast<const double*>(srcs[0]) + first, n * sizeof(double));
    for (std::size_t k = 1; k < sources; ++k)
      AddDouble(block, static_cast<const double*>(srcs[k]) + first, n);
    std::memcpy(dst + first, block, n * sizeof(double));
  }
}

void SumInt8(void* dst, const void* const* srcs, std::size_t sources, std::size_t count) {
  std::uint8_t block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = count - first < kBlock ? count - first : kBlock;
    std::memcpy(block, static_cast<const char*>(srcs[0]) + first, n);
    for (std::size_t k = 1; k < sources; ++k)
      AddInt8(block, static_cast<const std::uint8_t*>(srcs[k]) + first, n);
    std::memcpy(static_cast<char*>(dst) + first, block, n);
  }
}

void SumHalf(void* dst, const void* const* srcs, std::size_t sources, DType dtype, std::size_t count) {
  float sum[kBlock];
  float term[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = count - first < kBlock ? count - first : kBlock;
    LoadFloat(At(srcs[0], dtype, first), dtype, sum, n);
    for (std::size_t k = 1; k < sources; ++k) {
      LoadFloat(At(srcs[k], dtype, first), dtype, term, n);
      AddFloat(sum, term, n);
    }
    StoreFloat(sum, At(dst, dtype, first), dtype, n);
  }
}

}  // namespace

void Copy(void* dst, const void* src, std::size_t bytes) {
  constexpr std::size_t kLarge = 8u << 20;  // larger than the caches: glibc's streaming stores are faster
  if (bytes >= kLarge) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const std::size_t vectors = bytes / sizeof(Vector);
  const std::size_t done = vectors * sizeof(Vector);
  CopyVectors(static_cast<char*>(dst), static_cast<const char*>(src), vectors);
  std::memcpy(static_cast<char*>(dst) + done, static_cast<const char*>(src) + done, bytes - done);
}

#if defined(__x86_64__)
namespace {

bool HasFastRepMovsb() {
  static const bool has = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kErms = 1u << 9;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kErms) != 0;
  }();
  return has;
}

}  // namespace

void CopyToPeers(void* dst, const void* src, std::size_t bytes) {
  constexpr std::size_t kLeast = 2048;
  const bool alike =
      (reinterpret_cast<std::uintptr_t>(dst) ^ reinterpret_cast<std::uintptr_t>(src)) % kAlignment == 0;
  if (bytes < kLeast || !alike || !HasFastRepMovsb()) return Copy(dst, src, bytes);
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
}
#else
void CopyToPeers(void* dst, const void* src, std::size_t bytes) { Copy(dst, src, bytes); }
#endif

void ScaleAndCast(const void* src, DType src_type, void* dst, DType dst_type, std::size_t count,
                  double scale) {
  if (count == 0) return;
  if (src_type == dst_type && scale == 1.0) {
    Copy(dst, src, count * SizeOf(src_type));
    return;
  }
  if (src_type == DType::kFloat32 && dst_type == DType::kFloat32) {
    return ScaleFloat(static_cast<const float*>(src), static_cast<float*>(dst), count,
                      static_cast<float>(scale));
  }
  if (src_type == DType::kFloat64 && dst_type == DType::kFloat64) {
    return ScaleDouble(static_cast<const double*>(src), static_cast<double*>(dst), count, scale);
  }
  float block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = count - first < kBlock ? count - first : kBlock;
    LoadFloat(At(src, src_type, first), src_type, block, n);
    if (scale != 1.0) ScaleFloat(block, block, n, static_cast<float>(scale));
    StoreFloat(block, At(dst, dst_type, first), dst_type, n);
  }
}

void AddInto(void* dst, const void* src, DType dtype, std::size_t count) {
  if (dtype == DType::kFloat32) {
    return AddFloat(static_cast<float*>(dst), static_cast<const float*>(src), count);
  }
  if (dtype == DType::kFloat64) {
    return AddDouble(static_cast<double*>(dst), static_cast<const double*>(src), count);
  }
  if (dtype == DType::kInt8) {
    return AddInt8(static_cast<std::uint8_t*>(dst), static_cast<const std::uint8_t*>(src), count);
  }
  const void* sources[] = {dst, src};
  SumHalf(dst, sources, 2, dtype, count);
}

void SumInto(void* dst, const void* const* srcs, std::size_t sources, DType dtype, std::size_t count) {
  if (sources == 1) {
    if (dst != srcs[0]) std::memcpy(dst, srcs[0], count * SizeOf(dtype));
    return;
  }
  if (sources == 2 && dst == srcs[0]) return AddInto(dst, srcs[1], dtype, count);
  if (dtype == DType::kFloat32) return SumFloat(static_cast<float*>(dst), srcs, sources, count);
  if (dtype == DType::kFloat64) return SumDouble(static_cast<double*>(dst), srcs, sources, count);
  if (dtype == DType::kInt8) return SumInt8(dst, srcs, sources, count);
  SumHalf(dst, srcs, sources, dtype, count);
}

void Scale(void* buffer, DType dtype, std::size_t count, double scale) {
  if (scale != 1.0) ScaleAndCast(buffer, dtype, buffer, dtype, count, scale);
}

}  // namespace hvpipe
