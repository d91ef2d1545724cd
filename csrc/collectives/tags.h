// MPI message tags and priorities.
#pragma once

namespace hvpipe {

// Tags between all ranks: control records, then blocking calls (used in turn), then buckets (one each). MPI
// guarantees tags up to 32767.
inline constexpr int kControlTag = 1;
inline constexpr int kFirstCallTag = 16;
inline constexpr int kCallTags = 1024;
inline constexpr int kFirstBucketTag = kFirstCallTag + kCallTags;
inline constexpr int kBucketTags = 32767 - kFirstBucketTag;

// Tags on other communicators.
inline constexpr int kMessageTags = 32767;
inline constexpr int kMakeGroupTag = kMessageTags;
inline constexpr int kGroupTag = 2;

inline constexpr int kControlPriority = -2;  // before any bucket, because all buckets wait for it
inline constexpr int kBlockingPriority = -1;
inline constexpr int kMessagePriority =
    -1;  // a pipeline stage, or the caller of a call by name, waits for it

}  // namespace hvpipe
