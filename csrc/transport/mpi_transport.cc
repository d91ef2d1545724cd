// Non-blocking point-to-point messages over MPI.
#include "transport/mpi_transport.h"

#include <numeric>

#include "transport/mpi_error.h"

namespace hvpipe {
namespace {

constexpr std::size_t kSmallBytes = 20'000;

std::vector<int> RanksInJob(MPI_Comm communicator, int size) {
  std::vector<int> peers(static_cast<std::size_t>(size)), ranks(peers.size());
  std::iota(peers.begin(), peers.end(), 0);
  MPI_Group ours = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  HVPIPE_MPI(MPI_Comm_group(communicator, &ours));
  HVPIPE_MPI(MPI_Comm_group(MPI_COMM_WORLD, &all));
  HVPIPE_MPI(MPI_Group_translate_ranks(ours, size, peers.data(), all, ranks.data()));
  HVPIPE_MPI(MPI_Group_free(&ours));
  HVPIPE_MPI(MPI_Group_free(&all));
  return ranks;
}

}  // namespace

MpiTransport::MpiTransport(MPI_Comm communicator, bool fast, Small small)
    : communicator_(communicator), fast_(fast), small_(small) {
  HVPIPE_MPI(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN));
  HVPIPE_MPI(MPI_Comm_rank(communicator_, &rank_));
  HVPIPE_MPI(MPI_Comm_size(communicator_, &size_));
  ranks_in_job_ = RanksInJob(communicator_, size_);
  void* most_tag = nullptr;
  int found = 0;
  HVPIPE_MPI(MPI_Comm_get_attr(communicator_, MPI_TAG_UB, &most_tag, &found));
  if (found != 0) most_tag_ = *static_cast<const int*>(most_tag);
}

void MpiTransport::Free() { HVPIPE_MPI(MPI_Comm_free(&communicator_)); }

Ticket MpiTransport::NewTicket() {
  if (free_.empty()) {
    requests_.push_back(MPI_REQUEST_NULL);
    done_.push_back(0);
    completed_.push_back(0);
    return static_cast<Ticket>(requests_.size() - 1);
  }
  const Ticket ticket = free_.back();
  free_.pop_back();
  return ticket;
}

// Synchronous mode. Below the eager limit MPI still sends the data at once. The acknowledgement that
// completes the send limits how far a sender gets ahead of its receiver.
Ticket MpiTransport::Isend(const void* data, std::size_t bytes, int peer, int tag) {
  const Ticket ticket = NewTicket();
  const auto send = small_ == Small::kSent && bytes <= kSmallBytes ? &MPI_Isend : &MPI_Issend;
  HVPIPE_MPI(send(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_,
                  &requests_[static_cast<std::size_t>(ticket)]));
  return ticket;
}

Ticket MpiTransport::Irecv(void* data, std::size_t bytes, int peer, int tag) {
  const Ticket ticket = NewTicket();
  HVPIPE_MPI(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_,
                       &requests_[static_cast<std::size_t>(ticket)]));
  return ticket;
}

void MpiTransport::Poll() {
  if (free_.size() == requests_.size()) return;
  // Open MPI looks at the requests before it moves messages, so a second call sees what the first one moved.
  int count = 0;
  for (int looks = 0; looks < 2 && count == 0; ++looks) {
    HVPIPE_MPI(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, completed_.data(),
                            MPI_STATUSES_IGNORE));
  }
  if (count == MPI_UNDEFINED) return;
  for (int i = 0; i < count; ++i) {
    done_[static_cast<std::size_t>(completed_[static_cast<std::size_t>(i)])] = 1;
  }
}

bool MpiTransport::Test(Ticket ticket) {
  char& done = done_[static_cast<std::size_t>(ticket)];
  if (done == 0) return false;
  done = 0;
  free_.push_back(ticket);
  return true;
}

bool MpiTransport::Probe(int peer, int tag) {
  int found = 0;
  HVPIPE_MPI(MPI_Iprobe(peer, tag, communicator_, &found, MPI_STATUS_IGNORE));
  return found != 0;
}

}  // namespace hvpipe
