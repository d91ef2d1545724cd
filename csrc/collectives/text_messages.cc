// Sends and receives texts over a communicator of their own.
#include "collectives/text_messages.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "core/mpi_error.h"

namespace hvpipe {

TextMessages::TextMessages(MPI_Comm communicator) : communicator_(communicator) {
  HVPIPE_MPI(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN));
  int size = 1;
  HVPIPE_MPI(MPI_Comm_rank(communicator_, &rank_));
  HVPIPE_MPI(MPI_Comm_size(communicator_, &size));
  Owner mine;
  mine.pid = static_cast<int>(getpid());
  gethostname(mine.host, sizeof mine.host - 1);
  struct stat space;
  if (stat("/proc/self/ns/pid", &space) == 0) mine.pid_namespace = space.st_ino;
  std::ifstream("/proc/sys/kernel/random/boot_id").getline(mine.boot, sizeof mine.boot);
  owners_.resize(static_cast<std::size_t>(size));
  HVPIPE_MPI(
      MPI_Allgather(&mine, sizeof mine, MPI_BYTE, owners_.data(), sizeof mine, MPI_BYTE, communicator_));
}

// MPI may still read a text to a rank that has not taken it.
TextMessages::~TextMessages() {
  if (!sent_.empty()) new std::list<Sent>(std::move(sent_));
}

std::string TextMessages::NameOf(int rank) const {
  const Owner& owner = owners_[static_cast<std::size_t>(rank)];
  return "rank " + std::to_string(rank) + " on " + owner.host + " (pid " + std::to_string(owner.pid) + ")";
}

int TextMessages::LocalPid(int rank) const {
  const Owner& owner = owners_[static_cast<std::size_t>(rank)];
  const Owner& mine = owners_[static_cast<std::size_t>(rank_)];
  const bool here = std::strcmp(owner.host, mine.host) == 0 && std::strcmp(owner.boot, mine.boot) == 0;
  return here && owner.pid_namespace == mine.pid_namespace ? owner.pid : 0;
}

void TextMessages::Send(int rank, int kind, const std::string& text) {
  Sent& sent = sent_.emplace_back();
  sent.text = text;
  HVPIPE_MPI(MPI_Isend(sent.text.data(), static_cast<int>(sent.text.size()), MPI_BYTE, rank, kind,
                       communicator_, &sent.request));
}

std::optional<TextMessage> TextMessages::Receive() {
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
  return message;
}

void TextMessages::Free() {
  while (Receive()) continue;
  HVPIPE_MPI(MPI_Comm_free(&communicator_));
}

}  // namespace hvpipe
