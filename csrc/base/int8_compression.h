// The arithmetic of compression "int8" in host memory, in one pass over the gradients for each phase.
//
// The same formulas as Int8Compressor in hvpipe/keras/data_parallel/gradient_compressors.py, with the same
// values. TensorFlow's own operations need some twenty passes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvpipe {

// given[i] = gradient[i] * share + error[i]; maximum: the largest absolute value. A NaN or an infinity makes
// the maximum one as well. `given` may be `gradient`.
void Int8First(const float* gradient, float share, const float* error, std::size_t count, float* given,
               float* maximum);

// The bytes of a block: given[i] / scale, rounded to the nearest; error: what they leave out. If `scale` is
// so small that its inverse would be infinite, the bytes are 0. If it is not finite, bytes and errors are 0.
// `error` may be `given`.
void Int8Second(const float* given, float scale, std::size_t count, std::int8_t* bytes, float* error);

// gradient[i] = sums[i] * scale.
void Int8Decode(const std::int8_t* sums, float scale, std::size_t count, float* gradient);

}  // namespace hvpipe
