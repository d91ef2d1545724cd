// Messages and sums of groups that were announced before their arrays exist.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "gpu/group_reduce.h"
#include "progress/operation.h"

namespace hvpipe {

struct PostedMessage {
  int peer, tag;
  std::string what;
  Done done;                     // of a send; a receive has an operation of its own that calls `done`
  std::shared_ptr<void> memory;  // of a receive
  std::size_t bytes;             // of a receive
  std::shared_ptr<GroupReduce> reduce{};  // of a sum, which is sent, then received

  bool receives() const { return memory != nullptr; }
};

// The messages that wait for their second call, by number. Each is taken at most once.
//
// Threads: any thread may call; a lock guards the map. Callbacks run without it.
class PostedMessages {
 public:
  std::int64_t Add(PostedMessage message);
  // Add a message under a number that was taken.
  void AddAs(std::int64_t number, PostedMessage message);
  // Remove and return a message; empty if no message has this number.
  std::optional<PostedMessage> Take(std::int64_t number);
  // Remove all sends and call their `done`. Their arrays will not come.
  void EndSends(const Error& error);

 private:
  std::mutex mutex_;
  std::map<std::int64_t, PostedMessage> messages_;
  std::int64_t next_ = 0;
};

}  // namespace hvpipe
