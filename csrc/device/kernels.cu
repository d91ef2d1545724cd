// Packs and unpacks any number of tensors in one launch: scale, cast, check.
#include "device/kernels.h"

#include "device/tiles.h"

namespace hvpipe {
namespace {

template <typename From, typename To, int kCapacity>
__global__ void __launch_bounds__(kTileThreads)
    MoveKernel(const __grid_constant__ TileTable<kCapacity> table) {
  MoveTile<From, To>(table, blockIdx.x, threadIdx.x, kTileThreads);
}

template <int kCapacity>
cudaError_t LaunchTables(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                         unsigned* not_finite, cudaStream_t stream) {
  cudaError_t outcome = cudaSuccess;
  WithTypes(from, to, [&](auto source, auto target) {
    using From = decltype(source);
    using To = decltype(target);
    ForEachTable<kCapacity>(pieces, scale, not_finite, [&](const auto& table, unsigned tiles) {
      if (outcome != cudaSuccess) return;
      // Its own code, and not that of whatever failed on this thread before, which cudaGetLastError has.
      const void* arguments[] = {&table};
      outcome = cudaLaunchKernel(MoveKernel<From, To, kCapacity>, dim3(tiles), dim3(kTileThreads),
                                 const_cast<void**>(arguments), 0, stream);
    });
  });
  return outcome;
}

}  // namespace

cudaError_t FindKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, MoveKernel<float, float, kFewPieces>);
}

cudaError_t LaunchMove(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                       unsigned* not_finite, cudaStream_t stream) {
#if CUDART_VERSION >= 12010
  // A driver of an earlier 12 runs this as well, but takes shorter tables alone.
  static const bool takes_many = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
  }();
  if (takes_many && pieces.size() > kFewPieces)
    return LaunchTables<kManyPieces>(pieces, from, to, scale, not_finite, stream);
#endif
  return LaunchTables<kFewPieces>(pieces, from, to, scale, not_finite, stream);
}

}  // namespace hvpipe
