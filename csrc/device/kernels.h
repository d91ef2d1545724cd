// Launches the kernel that packs and unpacks.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "device/device.h"

namespace hvpipe {

// Load all kernels, so that no launch waits for that. An error if they were not compiled for the current
// device.
cudaError_t LoadKernels();

// Stops at the first launch that fails; earlier launches still run.
cudaError_t LaunchScaleAndCast(const std::vector<Device::Piece>& pieces, DType from, DType to, double scale,
                               cudaStream_t stream);

}  // namespace hvpipe
