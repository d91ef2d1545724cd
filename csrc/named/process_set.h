// The ranks of one process set, and the data exchange among them.
#pragma once

#include <memory>
#include <vector>

#include "named/call.h"
#include "named/links.h"

namespace hvpipe::named {

// Threads: only the service thread of NamedCalls runs collectives; anybody may read the ranks.
class ProcessSet {
 public:
  // `links` are null if this rank is alone or no member.
  ProcessSet(std::unique_ptr<SetLinks> links, std::vector<int> ranks, int rank);
  ProcessSet(const ProcessSet&) = delete;
  ProcessSet& operator=(const ProcessSet&) = delete;

  const std::vector<int>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  // This rank's place among `ranks`, or -1.
  int place() const { return place_; }
  int PlaceOf(int rank) const;

  // Each throws Error if the links fail. All members call them in one order.
  void Allreduce(const Call& call) const;
  // Take part in an allreduce with zeros.
  void AllreduceZeros(const Request& example) const;
  void Allgather(const Call& call, const std::vector<std::int64_t>& rows) const;
  void Broadcast(const Call& call) const;
  void Alltoall(const Call& call, const std::vector<std::int64_t>& received) const;
  void Reducescatter(const Call& call) const;
  // Collective.
  void Free();

 private:
  // `data` becomes its reduction over the set, times the request's factors.
  void ReduceInPlace(void* data, Type type, std::int64_t count, const Request& request) const;
  void ReduceWider(char* data, Type type, std::int64_t count, const Request& request) const;
  std::vector<const void*> PartsOf(const char* all, Type type, std::int64_t count) const;
  // Divides and multiplies a sum over the set as its request says.
  void ScaleSum(void* data, Type type, std::int64_t count, const Request& request) const;
  void Adasum(void* data, Type type, std::int64_t count) const;

  const std::unique_ptr<SetLinks> links_;
  std::vector<int> ranks_;
  int place_;
};

}  // namespace hvpipe::named
