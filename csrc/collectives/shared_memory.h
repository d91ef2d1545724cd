// Collectives between the ranks of one host through a window of shared memory.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/collective.h"

namespace hvpipe {

// A small window with, for each rank of the host, a ring of slots and counters of what it has written,
// reduced and finished reading. All transfers of a host pass through it in one order ("the lane"), chunk
// by chunk, so that the data stays in cache; its size does not depend on the model.
class Lane {
 public:
  struct Options {
    std::size_t slot_bytes = 256 * 1024;
    std::size_t slots = 4;
  };

  // What a rank says of the chunk in one of its slots.
  struct SlotHeader {
    std::uint64_t signature = 0;  // of the operation
    std::uint64_t sequence = 0;   // of the operation
    std::uint64_t bytes = 0;      // valid in the slot
    char what[104] = {};          // the operation in words
  };

  // Collective over `local`, the ranks of one host; takes the communicator over.
  Lane(MPI_Comm local, Options options);
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Collective; the end of this lane's use.
  void Free();

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::size_t slot_bytes() const { return options_.slot_bytes; }
  std::size_t slots() const { return options_.slots; }

  // Counters are in chunks since the start; each is written by its owner alone.
  std::atomic<std::uint64_t>& written(int rank) const { return Counter(rank, 0); }
  std::atomic<std::uint64_t>& reduced(int rank) const { return Counter(rank, 1); }
  std::atomic<std::uint64_t>& read(int rank) const { return Counter(rank, 2); }
  SlotHeader& header(int rank, std::uint64_t chunk) const;
  char* slot(int rank, std::uint64_t chunk) const;

  bool AllWritten(std::uint64_t chunks) const;
  bool AllReduced(std::uint64_t chunks) const;
  bool AllRead(std::uint64_t chunks) const;

  std::uint64_t position = 0;  // chunks that operations before the present one took

 private:
  std::atomic<std::uint64_t>& Counter(int rank, int which) const;

  Options options_;
  MPI_Comm local_;
  MPI_Win window_ = MPI_WIN_NULL;
  int rank_ = 0;
  int size_ = 1;
  std::vector<char*> base_;  // by rank
};

// One operation's identity, the same on all ranks of the host.
struct LaneTag {
  std::uint64_t signature = 0;
  std::uint64_t sequence = 0;
  std::string what;
};

// All-reduce, or reduce to the first rank of the host, over the lane. Summed in rank order.
class LaneReduce : public Collective {
 public:
  enum class Result { kAll, kLeader };

  LaneReduce(Lane& lane, Counters& counters, LaneTag tag, const void* in, void* out, std::size_t count,
             DType dtype, double scale, Result result);

  bool Step() override;
  bool done() const override;
  std::string Waiting() const override;

 private:
  Range Chunk(std::uint64_t chunk) const;
  void Begin();
  bool Write();
  bool Reduce();
  bool Read();
  void CheckSameOperation(std::uint64_t chunk) const;
  void SumChunk(void* target, std::uint64_t chunk, Range part, const char* own) const;
  Range Slice(std::size_t count, int owner) const;
  bool WantsResult() const { return result_ == Result::kAll || lane_.rank() == 0; }
  bool Whole() const;

  Lane& lane_;
  Counters& counters_;
  LaneTag tag_;
  const char* in_;
  char* out_;
  std::size_t count_;
  DType dtype_;
  double scale_;
  Result result_;
  bool begun_ = false;
  std::size_t per_chunk_ = 0;
  std::uint64_t chunks_ = 0;
  std::uint64_t base_ = 0;
  std::uint64_t written_ = 0, reduced_ = 0, read_ = 0;
};

// Bytes from one rank of the host to the others over the lane. Several may be under way: the chunk at hand
// names its operation, so receivers follow the order that the sender chose.
class LaneBroadcast : public Collective {
 public:
  LaneBroadcast(Lane& lane, Counters& counters, LaneTag tag, void* data, std::size_t bytes, int root);

  bool Step() override;
  bool done() const override { return finished_; }
  std::string Waiting() const override;
  double GraceS() const override { return lane_.rank() == root_ ? 0 : 1; }

 private:
  bool Send();
  bool Receive();

  Lane& lane_;
  Counters& counters_;
  LaneTag tag_;
  char* data_;
  std::size_t bytes_;
  int root_;
  std::size_t moved_ = 0;
  bool finished_ = false;
};

}  // namespace hvpipe
