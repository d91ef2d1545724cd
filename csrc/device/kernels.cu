// Packs and unpacks many tensors in one launch: scale and cast.
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
                         cudaStream_t stream) {
  cudaError_t outcome = cudaSuccess;
  WithTypes(from, to, [&](auto source, auto target) {
    using From = decltype(source);
    using To = decltype(target);
    ForEachTable<kCapacity>(pieces, scale, [&](const auto& table, unsigned tiles) {
      if (outcome != cudaSuccess) return;
      // cudaLaunchKernel returns the error of this launch; cudaGetLastError might return an earlier one.
      const void* arguments[] = {&table};
      outcome = cudaLaunchKernel(ScaleAndCastKernel<From, To, kCapacity>, dim3(tiles), dim3(kTileThreads),
                                 const_cast<void**>(arguments), 0, stream);
    });
  });
  return outcome;
}

// CUDA loads a kernel when its attributes are asked for.
template <int kCapacity>
cudaError_t LoadTables() {
  cudaError_t outcome = cudaSuccess;
  const auto load = [&](DType from, DType to) {
    WithTypes(from, to, [&](auto source, auto target) {
      cudaFuncAttributes attributes;
      if (outcome != cudaSuccess) return;
      outcome = cudaFuncGetAttributes(&attributes,
                                      ScaleAndCastKernel<decltype(source), decltype(target), kCapacity>);
    });
  };
  load(DType::kFloat64, DType::kFloat64);
  for (const DType from : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType to : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) load(from, to);
  }
  return outcome;
}

// Whether launches may have long tables. Drivers of CUDA 12.0 run this code too, but accept only short ones.
bool TakesMany() {
#if CUDART_VERSION >= 12010
  static const bool takes_many = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
  }();
  return takes_many;
#else
  return false;
#endif
}

}  // namespace

cudaError_t LoadKernels() {
  const cudaError_t outcome = LoadTables<kFewPieces>();
  return outcome == cudaSuccess && TakesMany() ? LoadTables<kManyPieces>() : outcome;
}

cudaError_t LaunchScaleAndCast(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                               cudaStream_t stream) {
  if (TakesMany() && pieces.size() > kFewPieces)
    return LaunchTables<kManyPieces>(pieces, from, to, scale, stream);
  return LaunchTables<kFewPieces>(pieces, from, to, scale, stream);
}

}  // namespace hvpipe
