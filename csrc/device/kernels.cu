// Packs and unpacks many tensors in one launch: scale, cast, check for values that are not finite.
#include "device/kernels.h"

#include "device/tiles.h"

namespace hvpipe {
namespace {

template <typename From, typename To, int kCapacity>
__global__ void __launch_bounds__(kTileThreads)
    ScaleAndCastKernel(const __grid_constant__ TileTable<kCapacity> table) {
  CastTile<From, To>(table, blockIdx.x, threadIdx.x, kTileThreads);
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
      // cudaLaunchKernel returns the error of this launch; cudaGetLastError might return an earlier one.
      const void* arguments[] = {&table};
      outcome = cudaLaunchKernel(ScaleAndCastKernel<From, To, kCapacity>, dim3(tiles), dim3(kTileThreads),
                                 const_cast<void**>(arguments), 0, stream);
    });
  });
  return outcome;
}

}  // namespace

cudaError_t FindKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, ScaleAndCastKernel<float, float, kFewPieces>);
}

cudaError_t LaunchScaleAndCast(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                               unsigned* not_finite, cudaStream_t stream) {
#if CUDART_VERSION >= 12010
  // Drivers of CUDA 12.0 run this code too, but accept only short tables.
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
