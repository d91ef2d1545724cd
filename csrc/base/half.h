// Conversions between float32 and the half types, one number at a time. On GPUs, too.
#pragma once

#include <cstdint>

#ifdef __CUDA_ARCH__
#define HVPIPE_HOST_DEVICE __device__ __forceinline__
#else
#include <cstring>
#define HVPIPE_HOST_DEVICE inline
#endif

namespace hvpipe {

HVPIPE_HOST_DEVICE float BitsToFloat(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

HVPIPE_HOST_DEVICE std::uint32_t FloatToBits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

// Rounds to nearest even, like hardware. A NaN keeps its sign and becomes quiet.
HVPIPE_HOST_DEVICE std::uint16_t FloatToBFloat16(float value) {
  const std::uint32_t bits = FloatToBits(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

HVPIPE_HOST_DEVICE float HalfToFloatScalar(std::uint16_t half) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return BitsToFloat(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return BitsToFloat(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: magnitude * 2^-24, exact in float32.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return BitsToFloat(sign | FloatToBits(value));
#endif
}

HVPIPE_HOST_DEVICE std::uint16_t FloatToHalfScalar(float value) {
#ifdef __CUDA_ARCH__
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  const std::uint32_t bits = FloatToBits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {
    const std::uint32_t rebased = magnitude - 0x38000000u;
    return static_cast<std::uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  }
  // Subnormal half: adding 0.5 lets the float32 adder round at the right bit.
  const std::uint32_t rounded = FloatToBits(BitsToFloat(magnitude) + 0.5f) - 0x3f000000u;
  return static_cast<std::uint16_t>(sign | rounded);
#endif
}

}  // namespace hvpipe
