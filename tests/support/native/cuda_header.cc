// Compiles only if csrc/gpu/cuda_driver.h agrees with CUDA's own header.
#include <cuda.h>

#include "gpu/cuda_driver.h"
#include "same_parameters.h"

namespace ours = hvpipe::cuda;

static_assert(ours::kSuccess == CUDA_SUCCESS && ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kMajorOfDevice == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kMinorOfDevice == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kTypeOfPointer == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kIsManaged == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(ours::kDeviceOfPointer == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(ours::kDeviceMemory == CU_MEMORYTYPE_DEVICE);
static_assert(ours::kNonBlockingStream == CU_STREAM_NON_BLOCKING);
static_assert(ours::kEventWithoutTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kPortableHostMemory == CU_MEMHOSTALLOC_PORTABLE);
static_assert(sizeof(ours::Uuid) == sizeof(CUuuid));
static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUmemorytype) == sizeof(unsigned));

#define HVPIPE_SAME(name, symbol, ...) \
  static_assert(SameParameters(static_cast<void (*)(__VA_ARGS__)>(nullptr), &symbol));
HVPIPE_CUDA_FUNCTIONS(HVPIPE_SAME)

bool SameStream() { return ours::LegacyStream() == static_cast<void*>(CU_STREAM_LEGACY); }
