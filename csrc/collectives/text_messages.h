// Short texts between ranks, beside all collectives.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <vector>

namespace hvpipe {

struct TextMessage {
  int rank;  // of the sender
  int kind;
  std::string text;
};

// Threads: one thread at a time, which is the watchdog's. No lock.
class TextMessages {
 public:
  // Collective. Takes ownership of the communicator.
  explicit TextMessages(MPI_Comm communicator);
  TextMessages(const TextMessages&) = delete;
  TextMessages& operator=(const TextMessages&) = delete;
  ~TextMessages();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(owners_.size()); }
  // Where a rank runs, such as "rank 2 on h1 (pid 1234)".
  std::string NameOf(int rank) const;
  // A process that this one can see; 0 if the rank runs on another host or in another container.
  int LocalPid(int rank) const;

  // Returns at once. A rank that does not run never gets it.
  void Send(int rank, int kind, const std::string& text);
  // The next message that has arrived.
  std::optional<TextMessage> Receive();
  // Collective. Drops what has arrived.
  void Free();

 private:
  struct Owner {
    int pid = 0;
    std::uint64_t pid_namespace = 0;
    char host[60] = {};
    char boot[40] = {};  // hosts may have the same name
  };
  struct Sent {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  MPI_Comm communicator_;
  int rank_ = 0;
  std::vector<Owner> owners_;  // by rank
  std::list<Sent> sent_;       // which MPI still reads
};

}  // namespace hvpipe
