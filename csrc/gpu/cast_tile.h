// Which thread of a device casts which elements of a bucket. Plain C++, so that tests run it on the CPU.
// NVRTC, which compiles it for GPUs (.ci/kernels.py), has none of C++'s headers except those that are stubbed
// there.
//
// The tensors of a bucket are cut into tiles of kTileElements. A block of threads casts one tile, and one
// launch casts all tiles of all tensors:
//
//   tensor    0           1     2
//   tile      0  1  2  3  4  5  6
//   block     one per tile; it finds its tensor by bisection of the tensors' first tiles
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/half.h"

#ifdef __CUDA_ARCH__
#define HVPIPE_UNROLL _Pragma("unroll")
#else
#define HVPIPE_UNROLL
#endif

namespace hvpipe {

constexpr unsigned kTileElements = 4096;
constexpr unsigned kTileThreads = 256;

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

HVPIPE_HOST_DEVICE float Widen(float value) { return value; }
HVPIPE_HOST_DEVICE double Widen(double value) { return value; }
HVPIPE_HOST_DEVICE float Widen(Half value) { return HalfToFloatScalar(value.bits); }
HVPIPE_HOST_DEVICE float Widen(BFloat16 value) {
  return BitsToFloat(static_cast<std::uint32_t>(value.bits) << 16);
}
HVPIPE_HOST_DEVICE void Narrow(float value, Half& to) { to.bits = FloatToHalfScalar(value); }
HVPIPE_HOST_DEVICE void Narrow(float value, BFloat16& to) { to.bits = FloatToBFloat16(value); }
HVPIPE_HOST_DEVICE void Narrow(float value, float& to) { to = value; }
HVPIPE_HOST_DEVICE void Narrow(double value, double& to) { to = value; }

// The tensors of one launch.
struct TileTable {
  static constexpr int kCapacity = 126;
  double scale;
  int pieces;
  struct Entry {
    const void* from;
    void* to;
    unsigned long long count;  // elements
    unsigned first_tile;
  } entries[kCapacity];
};
static_assert(sizeof(TileTable) <= 4096, "the most that a kernel's arguments take before CUDA 12.1");

HVPIPE_HOST_DEVICE int PieceOfTile(const TileTable& table, unsigned tile) {
  int low = 0, high = table.pieces;  // the piece is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.entries[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

template <typename From, typename To>
class TileCaster {
 public:
  // The larger type takes 16 bytes at a time, so that neighbouring threads fill whole sectors of memory.
  static constexpr std::size_t kLarger = sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To);
  static constexpr int kWide = static_cast<int>(16 / kLarger);
  static constexpr unsigned kBatch = 4;  // vectors that a thread loads at a time
  template <typename Type>
  struct alignas(kWide * sizeof(Type)) Vector {
    Type values[kWide];
  };
  using WideType = std::conditional_t<std::is_same_v<From, double>, double, float>;

  HVPIPE_HOST_DEVICE TileCaster(double scale)
      : scale_(static_cast<WideType>(scale)), plain_(std::is_same_v<From, To> && scale == 1.0) {}

  // Cast the elements of `thread`, out of `threads` threads that share `count` elements.
  HVPIPE_HOST_DEVICE void Cast(const From* from, To* to, std::size_t count, unsigned thread,
                               unsigned threads) const {
    std::size_t begin = 0;
    if (Aligned(from) && Aligned(to)) {
      const std::size_t vectors = count / kWide;
      const auto* const sources = reinterpret_cast<const Vector<From>*>(from);
      auto* const targets = reinterpret_cast<Vector<To>*>(to);
      for (std::size_t first = thread; first < vectors; first += std::size_t{threads} * kBatch) {
        Vector<From> loaded[kBatch];
        HVPIPE_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) {
          if (first + i * threads < vectors) loaded[i] = sources[first + i * threads];
        }
        HVPIPE_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) {
          if (first + i * threads >= vectors) break;
          Vector<To> result;
          HVPIPE_UNROLL
          for (int k = 0; k < kWide; ++k) CastOne(loaded[i].values[k], result.values[k]);
          targets[first + i * threads] = result;
        }
      }
      begin = vectors * kWide;
    }
    for (std::size_t i = begin + thread; i < count; i += threads) {
      To result;
      CastOne(from[i], result);
      to[i] = result;
    }
  }

 private:
  HVPIPE_HOST_DEVICE static bool Aligned(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  }

  // A plain copy keeps every bit.
  HVPIPE_HOST_DEVICE void CastOne(From from, To& to) const {
    if constexpr (std::is_same_v<From, To>) {
      if (plain_) {
        to = from;
        return;
      }
    }
    const WideType value = Widen(from) * scale_;
    Narrow(value, to);
  }

  const WideType scale_;
  const bool plain_;
};

// The work of thread `thread` in block `tile`.
template <typename From, typename To>
HVPIPE_HOST_DEVICE void CastTile(const TileTable& table, unsigned tile, unsigned thread, unsigned threads) {
  const auto& entry = table.entries[PieceOfTile(table, tile)];
  const unsigned long long first = static_cast<unsigned long long>(tile - entry.first_tile) * kTileElements;
  const unsigned long long left = entry.count - first;
  const TileCaster<From, To> caster(table.scale);
  caster.Cast(static_cast<const From*>(entry.from) + first, static_cast<To*>(entry.to) + first,
              static_cast<std::size_t>(left < kTileElements ? left : kTileElements), thread, threads);
}

}  // namespace hvpipe
