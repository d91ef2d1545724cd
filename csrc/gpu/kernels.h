// The kernels of kernels.cu, compiled.
#pragma once

namespace hvpipe {

// The text of kernels.ptx.
extern const char* const kKernels;

}  // namespace hvpipe
