// The kernels that pack and unpack a bucket: scale and cast many tensors in one launch. `python
// .ci/kernels.py` compiles them to kernels.ptx, which hvpipe carries and CUDA's driver compiles for the GPU
// that it finds.
#include "gpu/cast_tile.h"

// Named after the dtypes: CudaDevice finds them by name.
#define HVPIPE_CAST(from, From, to, To)                                               \
  extern "C" __global__ void __launch_bounds__(hvpipe::kTileThreads)                  \
      hvpipe_cast_##from##_##to(const __grid_constant__ hvpipe::TileTable table) {    \
    hvpipe::CastTile<From, To>(table, blockIdx.x, threadIdx.x, hvpipe::kTileThreads); \
  }
#define HVPIPE_CAST_TO_ALL(from, From)           \
  HVPIPE_CAST(from, From, float32, float)        \
  HVPIPE_CAST(from, From, float16, hvpipe::Half) \
  HVPIPE_CAST(from, From, bfloat16, hvpipe::BFloat16)

HVPIPE_CAST(float64, double, float64, double)
HVPIPE_CAST_TO_ALL(float32, float)
HVPIPE_CAST_TO_ALL(float16, hvpipe::Half)
HVPIPE_CAST_TO_ALL(bfloat16, hvpipe::BFloat16)
