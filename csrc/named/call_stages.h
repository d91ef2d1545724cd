// What ranks exchange for one call, as the stages of an operation.
#pragma once

#include <memory>
#include <vector>

#include "named/call.h"
#include "progress/network.h"
#include "progress/operation.h"

namespace hvpipe::named {

// The ranks of a process set as one of them sees them.
struct Members {
  std::vector<int> ranks;  // ascending
  int place = -1;          // this rank's place among them; -1: it is no member
  // Connects the members, and their peers are places. Null if this rank is alone or no member.
  Transport* transport = nullptr;
  // The same in shared memory. Null unless they are all ranks, on one host.
  SharedWindow* window = nullptr;

  int size() const { return static_cast<int>(ranks.size()); }
  int PlaceOf(int rank) const;
};

// A call that all members have made.
struct AgreedCall {
  Call call;
  Response response;
  Members members;
  // The first of the message tags that are this call's alone: as many as it has tensors, or one.
  int tag = 0;
};

// Append the stages that fill the call's outputs. Takes memory for the outputs at once, and may throw. The
// operation keeps `agreed` alive as long as messages may use its arrays. `network` is null if this rank is
// alone. Calls use the window in `order`.
void AddStages(Operation& operation, const std::shared_ptr<AgreedCall>& agreed, Network* network,
               OrderQueue* order);

// The call of a rank that has joined: the others' all-reduce, to which it adds zeros. The numbers are in
// `memory`.
Call ZerosFor(const Request& example, std::vector<std::unique_ptr<char[]>>& memory);

}  // namespace hvpipe::named
