// The launch of the one kernel that packs and unpacks.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "device/device.h"

namespace hvpipe {

// Whether the kernels are there for the current device: an error where they were not compiled for it.
cudaError_t FindKernels();

// The first launch that fails ends it; launches that went well stay.
cudaError_t LaunchMove(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                       unsigned* not_finite, cudaStream_t stream);

}  // namespace hvpipe
