// Message tags and priorities of the engine's traffic.
#pragma once

namespace hvpipe {

// Message tags: control records, then blocking calls in turn, then one for every bucket. MPI promises
// tags up to 32767.
inline constexpr int kControlTag = 1;
inline constexpr int kFirstCallTag = 16;
inline constexpr int kCallTags = 1024;
inline constexpr int kFirstBucketTag = kFirstCallTag + kCallTags;
inline constexpr int kBucketTags = 32767 - kFirstBucketTag;

inline constexpr int kControlPriority = -2;  // before any bucket: everything else waits for it
inline constexpr int kBlockingPriority = -1;

}  // namespace hvpipe
