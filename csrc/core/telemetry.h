// What one engine counts and records: traffic counters and the events of the trace.
#pragma once

#include <cstdint>

#include "core/event_log.h"

namespace hvpipe {

// Totals since the engine started. The driving thread writes them, and the caller where noted; readers may
// see values of different moments.
struct Counters {
  std::uint64_t network_bytes_sent = 0;
  std::uint64_t network_bytes_received = 0;
  std::uint64_t shared_memory_bytes = 0;  // written to shared memory by this rank
  std::uint64_t messages_sent = 0;
  std::uint64_t operations = 0;
  std::uint64_t steps = 0;  // written under the lock of GradientBuckets
  std::uint64_t sleeps = 0;
  // Time from Collect to the end of the reduction, over all buckets. Written under the lock of
  // GradientBuckets.
  double exposed_wait_s = 0;
};

struct Telemetry {
  explicit Telemetry(bool trace) : log(trace) {}
  Counters counters;
  EventLog log;
};

}  // namespace hvpipe
