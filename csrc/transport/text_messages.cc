// Sends and receives texts over a communicator of their own.
#include "transport/text_messages.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/event_log.h"
#include "transport/mpi_error.h"

namespace hvpipe {
namespace {

constexpr double kLeaveS = 2;  // messages of ranks that still run take less

}  // namespace

ProcessName ProcessName::Own() {
  ProcessName own;
  own.pid = static_cast<int>(getpid());
  gethostname(own.host, sizeof own.host - 1);
  struct stat space;
  if (stat("/proc/self/ns/pid", &space) == 0) own.pid_namespace = space.st_ino;
  std::ifstream("/proc/sys/kernel/random/boot_id").getline(own.boot, sizeof own.boot);
  return own;
}

MpiTextMessages::MpiTextMessages(MPI_Comm communicator) : communicator_(communicator) {
  HVPIPE_MPI(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN));
  int size = 1;
  HVPIPE_MPI(MPI_Comm_rank(communicator_, &rank_));
  HVPIPE_MPI(MPI_Comm_size(communicator_, &size));
  const ProcessName own = ProcessName::Own();
  processes_.resize(static_cast<std::size_t>(size));
  messages_to_.resize(processes_.size());
  HVPIPE_MPI(
      MPI_Allgather(&own, sizeof own, MPI_BYTE, processes_.data(), sizeof own, MPI_BYTE, communicator_));
}

// MPI may still read a text to a rank that has not taken it.
MpiTextMessages::~MpiTextMessages() {
  if (!sent_.empty()) new std::list<Sent>(std::move(sent_));
}

std::string TextMessages::NameOf(int rank) const {
  const ProcessName& process = processes_[static_cast<std::size_t>(rank)];
  return "rank " + std::to_string(rank) + " on " + process.host + " (pid " + std::to_string(process.pid) +
         ")";
}

int TextMessages::LocalPid(int rank) const {
  const ProcessName& other = processes_[static_cast<std::size_t>(rank)];
  const ProcessName& mine = processes_[static_cast<std::size_t>(rank_)];
  const bool here = std::strcmp(other.host, mine.host) == 0 && std::strcmp(other.boot, mine.boot) == 0;
  return here && other.pid_namespace == mine.pid_namespace ? other.pid : 0;
}

void MpiTextMessages::Send(int rank, int kind, const std::string& text) {
  Sent& sent = sent_.emplace_back();
  sent.text = text;
  HVPIPE_MPI(MPI_Isend(sent.text.data(), static_cast<int>(sent.text.size()), MPI_BYTE, rank, kind,
                       communicator_, &sent.request));
  ++messages_to_[static_cast<std::size_t>(rank)];
}

std::optional<TextMessage> MpiTextMessages::Receive() {
  for (auto sent = sent_.begin(); sent != sent_.end();) {
    int done = 0;
    HVPIPE_MPI(MPI_Test(&sent->request, &done, MPI_STATUS_IGNORE));
    sent = done != 0 ? sent_.erase(sent) : std::next(sent);
  }
  int found = 0, bytes = 0;
  MPI_Status status;
  HVPIPE_MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &found, &status));
  if (found == 0) return std::nullopt;
  HVPIPE_MPI(MPI_Get_count(&status, MPI_BYTE, &bytes));
  TextMessage message{status.MPI_SOURCE, status.MPI_TAG, std::string(static_cast<std::size_t>(bytes), '\0')};
  HVPIPE_MPI(MPI_Recv(message.text.data(), bytes, MPI_BYTE, message.rank, message.kind, communicator_,
                      MPI_STATUS_IGNORE));
  ++messages_received_;
  return message;
}

// A message that arrives later may find another communicator in the place of this one.
void MpiTextMessages::Free() {
  std::vector<int> messages_from(messages_to_.size());
  HVPIPE_MPI(MPI_Alltoall(messages_to_.data(), 1, MPI_INT, messages_from.data(), 1, MPI_INT, communicator_));
  const int all = std::accumulate(messages_from.begin(), messages_from.end(), 0);
  const double end_s = Now() + kLeaveS;
  while ((messages_received_ < all || !sent_.empty()) && Now() < end_s) Receive();
  HVPIPE_MPI(MPI_Comm_free(&communicator_));
}

}  // namespace hvpipe
