// Maps the memory that ranks of a host share.
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/mpi_error.h"

namespace hvpipe {
namespace {

// Whether an open file is this user's alone, and has so many bytes: a shorter one would end the process.
bool IsOwn(int file, std::size_t bytes) {
  struct stat found = {};
  return fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
         (found.st_mode & (S_IRWXG | S_IRWXO)) == 0 && static_cast<std::size_t>(found.st_size) >= bytes;
}

}  // namespace

void HostMemory::CheckRanks(int size) {
  if (static_cast<std::size_t>(size) > kMostRanksOfHost) {
    throw Error("A host should have at most " + std::to_string(kMostRanksOfHost) +
                    " ranks. Received: " + std::to_string(size),
                ErrorKind::kUsage);
  }
}

MpiHostMemory::MpiHostMemory(MPI_Comm local, std::size_t bytes) : local_(local) {
  int size = 1;
  HVPIPE_MPI(MPI_Comm_set_errhandler(local_, MPI_ERRORS_RETURN));
  HVPIPE_MPI(MPI_Comm_rank(local_, &rank_));
  HVPIPE_MPI(MPI_Comm_size(local_, &size));
  CheckRanks(size);
  MPI_Info info = MPI_INFO_NULL;
  HVPIPE_MPI(MPI_Info_create(&info));
  HVPIPE_MPI(MPI_Info_set(info, "alloc_shared_noncontig", "true"));
  void* mine = nullptr;
  HVPIPE_MPI(MPI_Win_allocate_shared(static_cast<MPI_Aint>(bytes), 1, info, local_, &mine, &window_));
  HVPIPE_MPI(MPI_Info_free(&info));
  std::memset(mine, 0, bytes);
  for (int peer = 0; peer < size; ++peer) {
    MPI_Aint found = 0;
    int unit = 0;
    void* address = nullptr;
    HVPIPE_MPI(MPI_Win_shared_query(window_, peer, &found, &unit, &address));
    sections_.push_back(static_cast<char*>(address));
  }
  HVPIPE_MPI(MPI_Barrier(local_));
}

void MpiHostMemory::Free() {
  HVPIPE_MPI(MPI_Win_free(&window_));
  HVPIPE_MPI(MPI_Comm_free(&local_));
}

FileHostMemory::FileHostMemory(const std::string& path, std::size_t offset, int rank, int size,
                               std::size_t bytes) {
  CheckRanks(size);
  rank_ = rank;
  // From its start, because an offset must be a multiple of the system's page size.
  mapped_bytes_ = offset + static_cast<std::size_t>(size) * bytes;
  const int file = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  int why = errno;
  mapped_ = MAP_FAILED;
  if (file >= 0 && !IsOwn(file, mapped_bytes_)) {
    why = EACCES;
  } else if (file >= 0) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    why = errno;
  }
  if (file >= 0) close(file);
  if (mapped_ == MAP_FAILED) {
    throw Error("This rank cannot map " + path + ", which the ranks of its host share: " +
                std::strerror(why) + ". HVPIPE_SHARED_MEMORY=0 does without.");
  }
  for (int peer = 0; peer < size; ++peer)
    sections_.push_back(static_cast<char*>(mapped_) + offset + static_cast<std::size_t>(peer) * bytes);
}

void FileHostMemory::Free() { munmap(mapped_, mapped_bytes_); }

}  // namespace hvpipe
