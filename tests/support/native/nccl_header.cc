// Compiles only if csrc/gpu/nccl.h agrees with NCCL's own header.
#include <nccl.h>

#include <cstddef>

#include HVPIPE_NCCL_H
#include "same_parameters.h"

namespace ours = hvpipe::nccl;

static_assert(ours::kSuccess == ncclSuccess && ours::kInProgress == ncclInProgress);
static_assert(ours::kSum == ncclSum && ours::kInt8 == ncclInt8 && ours::kMajor == NCCL_MAJOR);
static_assert(ncclFloat16 == 6 && ncclFloat32 == 7 && ncclFloat64 == 8 && ncclBfloat16 == 9);
static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(ours::Config) <= sizeof(ncclConfig_t));
static_assert(offsetof(ours::Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(ours::Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(ours::Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(ours::Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));

template <>
constexpr bool kSame<ours::UniqueId, ncclUniqueId> = true;

#define HVPIPE_SAME(name, ...) \
  static_assert(SameParameters(static_cast<void (*)(__VA_ARGS__)>(nullptr), &nccl##name));
HVPIPE_NCCL_FUNCTIONS(HVPIPE_SAME)
HVPIPE_NCCL_MEMORY_FUNCTIONS(HVPIPE_SAME)
