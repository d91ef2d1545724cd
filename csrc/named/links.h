// What named collectives travel through: MPI (mpi_links.h) or TCP (socket_links.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "named/call.h"

namespace hvpipe::named {

// Up to this size every rank sends all to all, in one round.
constexpr std::size_t kOneRoundBytes = 16'384;

// What each place gets of `count` elements or rows, when all share them out.
inline std::vector<std::int64_t> Shares(std::int64_t count, int places) {
  std::vector<std::int64_t> shares;
  for (int place = 0; place < places; ++place)
    shares.push_back(count / places + (place < count % places ? 1 : 0));
  return shares;
}

// Blocking collectives among the ranks of a set. "Place": a rank's number in the set. Each throws Error if
// the library fails.
//
// Threads: only the service thread of NamedCalls calls.
class SetLinks {
 public:
  virtual ~SetLinks() = default;
  SetLinks(const SetLinks&) = delete;
  SetLinks& operator=(const SetLinks&) = delete;

  // `data` becomes its reduction over the set. Average is a sum.
  virtual void AllReduce(void* data, std::int64_t count, Type type, ReduceOp op) = 0;
  // The first counts[0] elements of the reduction go to place 0, the next counts[1] to place 1, ...
  virtual void ReduceScatter(const void* in, void* out, const std::vector<std::int64_t>& counts, Type type,
                             ReduceOp op) = 0;
  // Send to a partner, which sends as much to this rank.
  virtual void Exchange(const void* mine, void* theirs, std::size_t bytes, int partner) = 0;
  // `rows[place]` rows of each place, in the order of places.
  virtual void AllGather(const void* mine, void* all, const std::vector<std::int64_t>& rows,
                         const TensorSpec& tensor) = 0;
  virtual void Broadcast(void* data, std::size_t bytes, int root) = 0;
  // `sent[place]` rows go to each place, and `received[place]` come from there.
  virtual void AllToAll(const void* in, const std::vector<std::int64_t>& sent, void* out,
                        const std::vector<std::int64_t>& received, const TensorSpec& tensor) = 0;
  // Collective. Nothing can be called afterwards.
  virtual void Free() = 0;

 protected:
  SetLinks() = default;
};

// Threads: only the service thread of NamedCalls calls, and its maker before the thread starts and after it
// has ended.
class Links {
 public:
  virtual ~Links() = default;
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Short messages. They arrive in order.
  virtual void Send(int rank, std::string bytes, int tag) = 0;
  // The next message with this tag that has arrived, and who sent it.
  virtual std::optional<std::pair<int, std::string>> Receive(int tag) = 0;
  // Whether all messages have left.
  virtual bool Sent() = 0;
  // Ranks that have ended, as far as that can be seen here.
  virtual std::vector<int> Lost() { return {}; }
  // Collective over all ranks. Null if this rank is not among `ranks`.
  virtual std::unique_ptr<SetLinks> MakeSet(const std::vector<int>& ranks) = 0;
  // Collective. Nothing can be called afterwards.
  virtual void Free() = 0;

 protected:
  Links() = default;
  int rank_ = 0, size_ = 1;
};

}  // namespace hvpipe::named
