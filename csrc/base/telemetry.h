// What one engine counts, and where it records events: counters, event log, flight recorder.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/event_log.h"
#include "base/flight_recorder.h"

namespace hvpipe {

// A total that any thread may read while it grows. One thread at a time adds, or callers hold a lock.
template <typename Number>
class Total {
 public:
  Total() = default;
  Total(const Total& other) : value_(other.value()) {}
  Total& operator=(const Total&) = delete;

  Number value() const { return value_.load(std::memory_order_relaxed); }
  void operator+=(Number more) { value_.store(value() + more, std::memory_order_relaxed); }
  void operator++() { *this += 1; }

 private:
  std::atomic<Number> value_{0};
};

// Totals since the engine started. The driving thread writes them, or the one noted. A copy may hold values
// of different moments.
struct Counters {
  Total<std::uint64_t> network_bytes_sent;
  Total<std::uint64_t> network_bytes_received;
  Total<std::uint64_t> shared_memory_bytes;  // written to shared memory by this rank
  Total<std::uint64_t> messages_sent;
  Total<std::uint64_t> operations;
  Total<std::uint64_t> steps;   // written under the lock of GradientBuckets
  Total<std::uint64_t> sleeps;  // written by the progress thread
  // Time from Collect to the end of the reduction, over all buckets. Written under the lock of
  // GradientBuckets.
  Total<double> exposed_wait_s;
};

struct Telemetry {
  Telemetry(bool trace, const std::string& flight_path) : log(trace), flight(flight_path) {}
  Counters counters;
  EventLog log;
  FlightRecorder flight;
};

}  // namespace hvpipe
