// A window of memory that the ranks of one host share.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hvpipe {

// The most ranks that may share a window.
inline constexpr std::size_t kMostRanksOfHost = 1024;

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

  // Collective over `local`, the ranks of one host. Takes ownership of the communicator.
  SharedWindow(MPI_Comm local, Options options);
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  // Collective. The window cannot be used afterwards.
  void Free();

  int rank() const { return rank_; }
  int size() const { return size_; }
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

  Options options_;
  MPI_Comm local_;
  MPI_Win window_ = MPI_WIN_NULL;
  int rank_ = 0;
  int size_ = 1;
  std::vector<char*> base_;  // by rank
};

// The identity of an operation. The same on all ranks of the host.
struct OperationTag {
  std::uint64_t signature = 0;
  std::uint64_t sequence = 0;
  std::string what;
};

}  // namespace hvpipe
