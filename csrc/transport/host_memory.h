// Raw memory that the ranks of one host share: over MPI, or a mapped file.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>
#include <vector>

namespace hvpipe {

// The most ranks of a host.
inline constexpr std::size_t kMostRanksOfHost = 1024;

// A section for each rank of the host, each zero at the start. Sections begin at a multiple of 4096 bytes if
// their size is one.
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // This rank's number among the ranks of the host.
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(sections_.size()); }
  char* section(int rank) const { return sections_[static_cast<std::size_t>(rank)]; }
  // Collective. The memory cannot be used afterwards.
  virtual void Free() = 0;

 protected:
  HostMemory() = default;
  static void CheckRanks(int size);

  int rank_ = 0;
  std::vector<char*> sections_;  // by rank
};

// A shared window of MPI.
class MpiHostMemory : public HostMemory {
 public:
  // Collective over `local`, the ranks of one host. Takes ownership of the communicator. `bytes`: of a
  // section.
  MpiHostMemory(MPI_Comm local, std::size_t bytes);
  void Free() override;

 private:
  MPI_Comm local_;
  MPI_Win window_ = MPI_WIN_NULL;
};

// A part of a file that all ranks of the host map.
class FileHostMemory : public HostMemory {
 public:
  // The file exists, is zero, and reaches to `offset` + `size` * `bytes` at least.
  FileHostMemory(const std::string& path, std::size_t offset, int rank, int size, std::size_t bytes);
  void Free() override;

 private:
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
};

}  // namespace hvpipe
