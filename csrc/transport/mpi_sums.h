// MPI's own all-reduce, on a communicator and a thread of its own.
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/dtype.h"
#include "base/error.h"

namespace hvpipe {

// The thread calls MPI_Allreduce, which blocks: MPI has better algorithms for that than for MPI_Iallreduce.
// Sums of half types are rounded wherever MPI adds.
//
// Threads: the driving thread calls all functions. The thread takes jobs in their order, which must be the
// same on all ranks. A mutex guards the queue.
class MpiSums {
 public:
  struct Job {
    const void* in;
    void* out;
    std::size_t count;
    DType dtype;
    std::optional<Error> error;  // before `ended`
    std::atomic<bool> ended{false};
  };

  // Takes ownership of `communicator`, which nobody else may use. The thread begins with the first job.
  explicit MpiSums(MPI_Comm communicator);
  // A thread that waits in MPI for ranks that never come is left behind.
  ~MpiSums();
  MpiSums(const MpiSums&) = delete;
  MpiSums& operator=(const MpiSums&) = delete;

  std::shared_ptr<Job> Start(const void* in, void* out, std::size_t count, DType dtype);
  // Collective, with no job under way.
  void Free();

 private:
  // Shared with the thread, which may outlive this.
  struct Queue {
    MPI_Comm communicator;
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::shared_ptr<Job>> jobs;
    bool stop = false, works = false;
  };
  static void Loop(const std::shared_ptr<Queue>& queue);

  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace hvpipe
