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

// On communicators of their own.
inline constexpr int kMessageTags = 32767;
inline constexpr int kMeetingTag = kMessageTags;
inline constexpr int kGroupTag = 2;

inline constexpr int kControlPriority = -2;  // before any bucket: everything else waits for it
inline constexpr int kBlockingPriority = -1;
inline constexpr int kMessagePriority = -1;  // a stage stands still until it has come

}  // namespace hvpipe
