// Which thread of a device casts which elements of a bucket. Plain C++, so that tests run it on the CPU.
//
// The tensors of a bucket are cut into tiles of kTileElements. A block of threads casts one tile, and one
// launch casts all tiles of all tensors:
//
//   tensor    0           1     2
//   tile      0  1  2  3  4  5  6
//   block     one per tile; it finds its tensor by bisection of the tensors' first tiles
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/half.h"
#include "device/device.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HVPIPE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HVPIPE_HOST_DEVICE inline
#endif
#ifdef __CUDA_ARCH__
#define HVPIPE_UNROLL _Pragma("unroll")
#else
#define HVPIPE_UNROLL
#endif

namespace hvpipe {

constexpr unsigned kTileElements = 4096;
constexpr unsigned kTileThreads = 256;

// Kernel arguments may take 4 KB, or 32,764 bytes since CUDA 12.1.
constexpr int kFewPieces = 126;
constexpr int kManyPieces = 1000;

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

HVPIPE_HOST_DEVICE float Widen(float value) { return value; }
HVPIPE_HOST_DEVICE double Widen(double value) { return value; }

HVPIPE_HOST_DEVICE float Widen(Half value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  return HalfToFloatScalar(value.bits);
#endif
}
HVPIPE_HOST_DEVICE float Widen(BFloat16 value) {
#ifdef __CUDA_ARCH__
  return __bfloat162float(__ushort_as_bfloat16(value.bits));
#else
  return BitsToFloat(static_cast<std::uint32_t>(value.bits) << 16);
#endif
}
HVPIPE_HOST_DEVICE void Narrow(float value, Half& to) {
#ifdef __CUDA_ARCH__
  to.bits = __half_as_ushort(__float2half_rn(value));
#else
  to.bits = FloatToHalfScalar(value);
#endif
}
HVPIPE_HOST_DEVICE void Narrow(float value, BFloat16& to) {
#ifdef __CUDA_ARCH__
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  to.bits = FloatToBFloat16(value);
#endif
}
HVPIPE_HOST_DEVICE void Narrow(float value, float& to) { to = value; }
HVPIPE_HOST_DEVICE void Narrow(double value, double& to) { to = value; }

template <int kCapacity>
struct TileTable {
  double scale;
  int pieces;
  struct Entry {
    const void* from;
    void* to;
    unsigned long long count;
    unsigned first_tile;
  } entries[kCapacity];
};
static_assert(sizeof(TileTable<kFewPieces>) <= 4096);
static_assert(sizeof(TileTable<kManyPieces>) <= 32764);

template <int kCapacity>
HVPIPE_HOST_DEVICE int PieceOfTile(const TileTable<kCapacity>& table, unsigned tile) {
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
template <typename From, typename To, int kCapacity>
HVPIPE_HOST_DEVICE void CastTile(const TileTable<kCapacity>& table, unsigned tile, unsigned thread,
                                 unsigned threads) {
  const auto& entry = table.entries[PieceOfTile(table, tile)];
  const unsigned long long first = static_cast<unsigned long long>(tile - entry.first_tile) * kTileElements;
  const unsigned long long left = entry.count - first;
  const TileCaster<From, To> caster(table.scale);
  caster.Cast(static_cast<const From*>(entry.from) + first, static_cast<To*>(entry.to) + first,
              static_cast<std::size_t>(left < kTileElements ? left : kTileElements), thread, threads);
}

// Call launch(table, tiles) for all pieces, with as many pieces per call as a table holds.
template <int kCapacity, typename Launch>
void ForEachTable(const std::vector<Device::Piece>& pieces, double scale, const Launch& launch) {
  TileTable<kCapacity> table{};
  table.scale = scale;
  unsigned tiles = 0;
  const auto flush = [&] {
    if (tiles > 0) launch(table, tiles);
    tiles = 0;
    table.pieces = 0;
  };
  for (const Device::Piece& piece : pieces) {
    if (piece.count == 0) continue;
    const std::size_t needed = (piece.count + kTileElements - 1) / kTileElements;
    if (needed > 0x7fffffffu) throw Error("internal: a tensor needs more blocks than one launch allows");
    if (table.pieces == kCapacity || tiles + needed > 0x7fffffffu) flush();
    table.entries[table.pieces++] = {piece.from, piece.to, piece.count, tiles};
    tiles += static_cast<unsigned>(needed);
  }
  flush();
}

// Call visit(From{}, To{}) with the C++ types of two dtypes.
template <typename Visit>
void WithTypes(DType from, DType to, const Visit& visit) {
  if (from == DType::kFloat64 && to == DType::kFloat64) return visit(double{}, double{});
  const auto none = [&] {
    return Error("internal: no cast from " + std::string(NameOf(from)) + " to " + NameOf(to));
  };
  const auto with_from = [&](auto source) {
    if (to == DType::kFloat32) return visit(source, float{});
    if (to == DType::kFloat16) return visit(source, Half{});
    if (to == DType::kBFloat16) return visit(source, BFloat16{});
    throw none();
  };
  if (from == DType::kFloat32) return with_from(float{});
  if (from == DType::kFloat16) return with_from(Half{});
  if (from == DType::kBFloat16) return with_from(BFloat16{});
  throw none();
}

}  // namespace hvpipe
