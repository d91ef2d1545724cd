// Short texts between ranks, beside all collectives.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hvpipe {

struct TextMessage {
  int rank;  // of the sender
  int kind;
  std::string text;
};

// The process of a rank.
struct ProcessName {
  int pid = 0;
  std::uint64_t pid_namespace = 0;
  char host[60] = {};
  char boot[40] = {};  // hosts may have the same name

  static ProcessName Own();
};

// Threads: one thread at a time: the watchdog's, or the driving thread. No lock.
class TextMessages {
 public:
  virtual ~TextMessages() = default;
  TextMessages(const TextMessages&) = delete;
  TextMessages& operator=(const TextMessages&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(processes_.size()); }
  // Where a rank runs, such as "rank 2 on h1 (pid 1234)".
  std::string NameOf(int rank) const;
  // A process that this one can see; 0 if the rank runs on another host or in another container.
  int LocalPid(int rank) const;

  // Returns at once. A rank that does not run never gets it.
  virtual void Send(int rank, int kind, const std::string& text) = 0;
  // The next message that has arrived.
  virtual std::optional<TextMessage> Receive() = 0;
  // Collective. Drops what was sent.
  virtual void Free() = 0;

 protected:
  TextMessages() = default;
  TextMessages(int rank, std::vector<ProcessName> processes)
      : rank_(rank), processes_(std::move(processes)) {}

  int rank_ = 0;
  std::vector<ProcessName> processes_;  // by rank
};

class MpiTextMessages : public TextMessages {
 public:
  // Collective. Takes ownership of the communicator.
  explicit MpiTextMessages(MPI_Comm communicator);
  ~MpiTextMessages() override;

  void Send(int rank, int kind, const std::string& text) override;
  std::optional<TextMessage> Receive() override;
  void Free() override;

 private:
  struct Sent {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  MPI_Comm communicator_;
  std::list<Sent> sent_;          // which MPI still reads
  std::vector<int> messages_to_;  // that were sent, by rank
  int messages_received_ = 0;
};

}  // namespace hvpipe
