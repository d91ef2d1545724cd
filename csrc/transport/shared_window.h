// Slots and counters in the memory of a host, through which its ranks pass chunks of data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/host_memory.h"

namespace hvpipe {

// A shared window in which each rank of the host has a ring of slots, and counters of the chunks that it has
// written, reduced, and read. All transfers pass through the window in one order, chunk by chunk, so the data
// stay in cache. Its size does not depend on the model.
//
// Threads: one thread of each rank at a time, the driving thread. Between processes the counters synchronise.
class SharedWindow {
 public:
  struct Options {
    std::size_t slot_bytes = 256 * 1024;
    std::size_t slots = 4;
  };

  // Describes the chunk in one of a rank's slots.
  struct SlotHeader {
    std::uint64_t signature = 0;  // of the operation
    std::uint64_t sequence = 0;   // of the operation
    std::uint64_t bytes = 0;      // valid in the slot
    char what[104] = {};          // description of the operation
  };

  // What each rank must have in the memory of its host.
  static std::size_t Bytes(const Options& options);
  // `memory` is zero at the start.
  SharedWindow(std::unique_ptr<HostMemory> memory, Options options);
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  // Collective. The window cannot be used afterwards.
  void Free() { memory_->Free(); }

  int rank() const { return memory_->rank(); }
  int size() const { return memory_->size(); }
  std::size_t slot_bytes() const { return options_.slot_bytes; }
  std::size_t slots() const { return options_.slots; }

  // Counters, in chunks since the start. Only their owner writes them.
  std::atomic<std::uint64_t>& written(int rank) const { return Counter(rank, 0); }
  std::atomic<std::uint64_t>& reduced(int rank) const { return Counter(rank, 1); }
  std::atomic<std::uint64_t>& read(int rank) const { return Counter(rank, 2); }
  SlotHeader& header(int rank, std::uint64_t chunk) const;
  char* slot(int rank, std::uint64_t chunk) const;

  bool AllWritten(std::uint64_t chunks) const;
  bool AllReduced(std::uint64_t chunks) const;
  bool AllRead(std::uint64_t chunks) const;

  std::uint64_t position = 0;  // chunks that the operations so far have taken

 private:
  std::atomic<std::uint64_t>& Counter(int rank, int which) const;

  const Options options_;
  const std::unique_ptr<HostMemory> memory_;
};

// The identity of an operation. The same on all ranks of the host.
struct OperationTag {
  std::uint64_t signature = 0;
  std::uint64_t sequence = 0;
  std::string what;
};

}  // namespace hvpipe
