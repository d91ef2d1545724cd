// The loops of compression "int8", for one block of numbers that share a scale.
#include "base/int8_compression.h"

#include <cmath>
#include <cstring>

#include "base/vectorised.h"

namespace hvpipe {
namespace {

constexpr float kSmallestScale = 1e-37F;  // as in gradient_compressors.py
// Added to a float below 2^22, it rounds it to the nearest integer, halves to even.
constexpr float kRounds = 12582912.0F;  // 1.5 * 2^23

}  // namespace

HVPIPE_VECTORISED void Int8First(const float* gradient, float share, const float* error, std::size_t count,
                                 float* given, float* maximum) {
  // Without the sign, bits of floats are in the order of their values, infinities and then NaNs last.
  std::int32_t largest = 0;
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) {
    const float value = gradient[i] * share + error[i];
    given[i] = value;
    std::int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  std::memcpy(maximum, &largest, sizeof largest);
}

HVPIPE_VECTORISED void Int8Second(const float* given, float scale, std::size_t count, std::int8_t* bytes,
                                  float* error) {
  if (!std::isfinite(scale)) {
    std::memset(bytes, 0, count);
    std::memset(error, 0, count * sizeof *error);
    return;
  }
  const float inverse = scale < kSmallestScale ? 0.0F : 1.0F / scale;
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) {
    const float steps = (given[i] * inverse + kRounds) - kRounds;
    bytes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(steps));
    error[i] = given[i] - steps * scale;
  }
}

HVPIPE_VECTORISED void Int8Decode(const std::int8_t* sums, float scale, std::size_t count, float* gradient) {
  HVPIPE_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) gradient[i] = static_cast<float>(sums[i]) * scale;
}

}  // namespace hvpipe
