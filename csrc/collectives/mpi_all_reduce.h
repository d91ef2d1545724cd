// An all-reduce by MPI's own algorithms.
#pragma once

#include <memory>
#include <string>

#include "base/telemetry.h"
#include "collectives/collective.h"
#include "transport/mpi_sums.h"

namespace hvpipe {

// From `in` to `out`, which may be `in`. Ranks make these in one order.
class MpiAllReduce : public Collective {
 public:
  MpiAllReduce(MpiSums& sums, Counters& counters, int ranks, const void* in, void* out, std::size_t count,
               DType dtype)
      : counters_(counters),
        ranks_(static_cast<std::size_t>(ranks)),
        job_(sums.Start(in, out, count, dtype)) {}
  bool Step() override {
    if (done_ || !job_->ended) return false;
    if (job_->error) throw *job_->error;
    // MPI does not say what it sends. A ring sends as little as possible.
    const std::size_t bytes = 2 * (ranks_ - 1) * (job_->count * SizeOf(job_->dtype) / ranks_);
    counters_.network_bytes_sent += bytes;
    counters_.network_bytes_received += bytes;
    return done_ = true;
  }
  bool done() const override { return done_; }
  std::string Waiting() const override { return "MPI_Allreduce, by another rank"; }
  double MostNapS() const override { return 50e-6; }

 private:
  Counters& counters_;
  const std::size_t ranks_;
  const std::shared_ptr<MpiSums::Job> job_;
  bool done_ = false;
};

}  // namespace hvpipe
