// A Transport over an MPI communicator of its own.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "transport/transport.h"

namespace hvpipe {

// Threads: one thread at a time, which is the driving thread (see Progress). No lock.
class MpiTransport : public Transport {
 public:
  // Whether small messages are done once they have left. Only where the receivers answer, or an algorithm
  // bounds how far a sender gets ahead: without an acknowledgement such a message takes half the time.
  enum class Small { kConfirmed, kSent };

  // Takes ownership of `communicator`, which nobody else may use.
  // `fast`: MPI sends through memory or by cards made for it.
  MpiTransport(MPI_Comm communicator, bool fast, Small small = Small::kConfirmed);
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int RankInJob(int peer) const override { return ranks_in_job_[static_cast<std::size_t>(peer)]; }
  Ticket Isend(const void* data, std::size_t bytes, int peer, int tag) override;
  Ticket Irecv(void* data, std::size_t bytes, int peer, int tag) override;
  void Poll() override;
  bool Test(Ticket ticket) override;
  bool Probe(int peer, int tag) override;
  std::size_t most_at_once() const override {
    return fast_ ? std::numeric_limits<std::size_t>::max()
                 : std::max<std::size_t>(1 << 20, 60'000 * static_cast<std::size_t>(size_));
  }
  double message_bytes() const override { return 20e3; }  // 18 KB by InfiniBand at 100 Gb/s
  int most_tag() const override { return most_tag_; }
  void Free() override;

 private:
  Ticket NewTicket();

  MPI_Comm communicator_;
  const bool fast_;
  const Small small_;
  int rank_ = 0;
  int size_ = 1;
  int most_tag_ = 32767;               // every MPI has as many
  std::vector<int> ranks_in_job_;      // by peer
  std::vector<MPI_Request> requests_;  // by ticket
  std::vector<char> done_;             // by ticket
  std::vector<int> completed_;         // scratch memory of Poll
  std::vector<Ticket> free_;
};

}  // namespace hvpipe
