// Hands sums to a thread that may block in MPI.
#include "transport/mpi_sums.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/vector_loops.h"
#include "transport/mpi_error.h"

namespace hvpipe {
namespace {

// After a job the thread looks for the next one for so long before it sleeps: to wake it up takes as long.
constexpr std::chrono::microseconds kLooks(50);
// Counts of MPI are ints.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;

void AddBFloat16(void* in, void* sum, int* count, MPI_Datatype*) {
  AddInto(sum, in, DType::kBFloat16, static_cast<std::size_t>(*count));
}

void AddFloat16(void* in, void* sum, int* count, MPI_Datatype*) {
  AddInto(sum, in, DType::kFloat16, static_cast<std::size_t>(*count));
}

MPI_Datatype TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return MPI_FLOAT;
    case DType::kFloat64:
      return MPI_DOUBLE;
    case DType::kInt8:
      return MPI_INT8_T;
    default:
      return MPI_UINT16_T;
  }
}

// Made once for the process, and never freed: MPI may have ended before.
MPI_Op OpOf(DType dtype) {
  const auto made = [](MPI_User_function* add) {
    MPI_Op op = MPI_OP_NULL;
    HVPIPE_MPI(MPI_Op_create(add, 1, &op));
    return op;
  };
  if (dtype == DType::kBFloat16) {
    static const MPI_Op op = made(&AddBFloat16);
    return op;
  }
  if (dtype == DType::kFloat16) {
    static const MPI_Op op = made(&AddFloat16);
    return op;
  }
  return MPI_SUM;
}

void Sum(const MpiSums::Job& job, MPI_Comm communicator) {
  const std::size_t element = SizeOf(job.dtype);
  for (std::size_t first = 0; first < job.count; first += kMostAtOnce) {
    const int count = static_cast<int>(std::min(kMostAtOnce, job.count - first));
    const void* const in = static_cast<const char*>(job.in) + first * element;
    void* const out = static_cast<char*>(job.out) + first * element;
    HVPIPE_MPI(MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, count, TypeOf(job.dtype), OpOf(job.dtype),
                             communicator));
  }
}

}  // namespace

MpiSums::MpiSums(MPI_Comm communicator) : queue_(std::make_shared<Queue>()) {
  HVPIPE_MPI(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN));
  queue_->communicator = communicator;
}

MpiSums::~MpiSums() {
  bool works = false;
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->stop = true;
    works = queue_->works;
  }
  queue_->wake.notify_all();
  if (!thread_.joinable()) return;
  works ? thread_.detach() : thread_.join();
}

std::shared_ptr<MpiSums::Job> MpiSums::Start(const void* in, void* out, std::size_t count, DType dtype) {
  auto job = std::make_shared<Job>();
  job->in = in;
  job->out = out;
  job->count = count;
  job->dtype = dtype;
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { Loop(queue); });
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->jobs.push_back(job);
  }
  queue_->wake.notify_all();
  return job;
}

void MpiSums::Free() { HVPIPE_MPI(MPI_Comm_free(&queue_->communicator)); }

void MpiSums::Loop(const std::shared_ptr<Queue>& queue) {
  prctl(PR_SET_NAME, "hvpipe MPI sums", 0UL, 0UL, 0UL);
  for (;;) {
    std::shared_ptr<Job> job;
    const auto until = std::chrono::steady_clock::now() + kLooks;
    for (bool looks = true; looks;) {
      const std::lock_guard<std::mutex> lock(queue->mutex);
      queue->works = false;
      looks = queue->jobs.empty() && !queue->stop && std::chrono::steady_clock::now() < until;
    }
    {
      std::unique_lock<std::mutex> lock(queue->mutex);
      queue->wake.wait(lock, [&] { return queue->stop || !queue->jobs.empty(); });
      if (queue->stop) return;
      queue->works = true;
      job = std::move(queue->jobs.front());
      queue->jobs.pop_front();
    }
    try {
      Sum(*job, queue->communicator);
    } catch (const std::exception& failure) {
      job->error = ErrorOf(failure);
    }
    job->ended = true;
  }
}

}  // namespace hvpipe
