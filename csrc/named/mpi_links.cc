// MPI's collectives on tensors of any element type.
#include "named/mpi_links.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <numeric>

#include "core/mpi_error.h"
#include "named/numbers.h"

namespace hvpipe::named {
namespace {

constexpr int kExchangeTag = 1;

int AsCount(std::int64_t value) {
  if (value > kMostAtOnce) {
    throw Error("A collective should have at most " + std::to_string(kMostAtOnce) +
                    " rows or elements. Received: " + std::to_string(value),
                ErrorKind::kUsage);
  }
  return static_cast<int>(value);
}

std::vector<int> AsCounts(const std::vector<std::int64_t>& values) {
  std::vector<int> counts;
  for (const std::int64_t value : values) counts.push_back(AsCount(value));
  return counts;
}

// Where each part begins.
std::vector<int> StartsOf(const std::vector<int>& counts) {
  std::vector<int> starts;
  std::int64_t next = 0;
  for (const int count : counts) {
    starts.push_back(AsCount(next));
    next += count;
  }
  return starts;
}

// One row of a tensor as an MPI type, so that counts stay small.
class RowType {
 public:
  explicit RowType(const TensorSpec& tensor) {
    HVPIPE_MPI(MPI_Type_contiguous(AsCount(tensor.row_elements()), MpiType(tensor.type), &type_));
    HVPIPE_MPI(MPI_Type_commit(&type_));
  }
  ~RowType() { MPI_Type_free(&type_); }
  RowType(const RowType&) = delete;
  RowType& operator=(const RowType&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

class MpiSetLinks : public SetLinks {
 public:
  // Takes ownership of `communicator`.
  explicit MpiSetLinks(MPI_Comm communicator) : communicator_(communicator) {
    HVPIPE_MPI(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN));
    HVPIPE_MPI(MPI_Comm_rank(communicator_, &place_));
  }

  void AllReduce(void* data, std::int64_t count, Type type, ReduceOp op) override {
    for (std::int64_t start = 0; start < count; start += kMostAtOnce) {
      char* const part = static_cast<char*>(data) + static_cast<std::size_t>(start) * SizeOf(type);
      HVPIPE_MPI(MPI_Allreduce(MPI_IN_PLACE, part, static_cast<int>(std::min(count - start, kMostAtOnce)),
                               MpiType(type), MpiOp(op, type), communicator_));
    }
  }

  void ReduceScatter(const void* in, void* out, const std::vector<std::int64_t>& counts, Type type,
                     ReduceOp op) override {
    (void)AsCount(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));  // MPI sums them up
    HVPIPE_MPI(
        MPI_Reduce_scatter(in, out, AsCounts(counts).data(), MpiType(type), MpiOp(op, type), communicator_));
  }

  void Exchange(const void* mine, void* theirs, std::size_t bytes, int partner) override {
    for (std::size_t start = 0; start < bytes; start += kMostAtOnce) {
      const int part = static_cast<int>(std::min(bytes - start, static_cast<std::size_t>(kMostAtOnce)));
      HVPIPE_MPI(MPI_Sendrecv(static_cast<const char*>(mine) + start, part, MPI_BYTE, partner, kExchangeTag,
                              static_cast<char*>(theirs) + start, part, MPI_BYTE, partner, kExchangeTag,
                              communicator_, MPI_STATUS_IGNORE));
    }
  }

  void AllGather(const void* mine, void* all, const std::vector<std::int64_t>& rows,
                 const TensorSpec& tensor) override {
    const std::int64_t all_rows = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    if (std::max(all_rows, tensor.row_elements()) > kMostAtOnce)
      return AllGatherByRank(mine, static_cast<char*>(all), rows, tensor.BytesOfRows(1));
    const RowType row(tensor);
    const std::vector<int> counts = AsCounts(rows);
    HVPIPE_MPI(MPI_Allgatherv(mine, counts[static_cast<std::size_t>(place_)], row.get(), all, counts.data(),
                              StartsOf(counts).data(), row.get(), communicator_));
  }

  void Broadcast(void* data, std::size_t bytes, int root) override {
    for (std::size_t start = 0; start < bytes; start += kMostAtOnce) {
      const int part = static_cast<int>(std::min(bytes - start, static_cast<std::size_t>(kMostAtOnce)));
      HVPIPE_MPI(MPI_Bcast(static_cast<char*>(data) + start, part, MPI_BYTE, root, communicator_));
    }
  }

  void AllToAll(const void* in, const std::vector<std::int64_t>& sent, void* out,
                const std::vector<std::int64_t>& received, const TensorSpec& tensor) override {
    const RowType row(tensor);
    const std::vector<int> to = AsCounts(sent), from = AsCounts(received);
    HVPIPE_MPI(MPI_Alltoallv(in, to.data(), StartsOf(to).data(), row.get(), out, from.data(),
                             StartsOf(from).data(), row.get(), communicator_));
  }

  void Free() override { HVPIPE_MPI(MPI_Comm_free(&communicator_)); }

 private:
  // MPI_Allgatherv has no counts for so many rows.
  void AllGatherByRank(const void* mine, char* all, const std::vector<std::int64_t>& rows,
                       std::size_t row_bytes) {
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
      const std::size_t bytes = static_cast<std::size_t>(rows[rank]) * row_bytes;
      if (rank == static_cast<std::size_t>(place_)) std::memcpy(all, mine, bytes);
      Broadcast(all, bytes, static_cast<int>(rank));
      all += bytes;
    }
  }

  MPI_Comm communicator_;
  int place_ = 0;
};

class MpiLinks : public Links {
 public:
  explicit MpiLinks(MPI_Comm world) {
    HVPIPE_MPI(MPI_Comm_dup(world, &control_));
    HVPIPE_MPI(MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN));
    HVPIPE_MPI(MPI_Comm_rank(control_, &rank_));
    HVPIPE_MPI(MPI_Comm_size(control_, &size_));
  }

  // After an error MPI may still read what was not sent.
  ~MpiLinks() override {
    if (!sends_.empty()) new std::list<Sending>(std::move(sends_));
  }

  void Send(int rank, std::string bytes, int tag) override {
    Sending& sending = sends_.emplace_back();
    sending.bytes = std::move(bytes);
    HVPIPE_MPI(MPI_Isend(sending.bytes.data(), static_cast<int>(sending.bytes.size()), MPI_BYTE, rank, tag,
                         control_, &sending.request));
  }

  std::optional<std::pair<int, std::string>> Receive(int tag) override {
    int there = 0, bytes = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    HVPIPE_MPI(MPI_Improbe(MPI_ANY_SOURCE, tag, control_, &there, &message, &status));
    if (there == 0) return std::nullopt;
    HVPIPE_MPI(MPI_Get_count(&status, MPI_BYTE, &bytes));
    std::string text(static_cast<std::size_t>(bytes), '\0');
    HVPIPE_MPI(MPI_Mrecv(text.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE));
    return std::make_pair(status.MPI_SOURCE, std::move(text));
  }

  bool Sent() override {
    for (auto at = sends_.begin(); at != sends_.end();) {
      int done = 0;
      HVPIPE_MPI(MPI_Test(&at->request, &done, MPI_STATUS_IGNORE));
      at = done != 0 ? sends_.erase(at) : std::next(at);
    }
    return sends_.empty();
  }

  std::unique_ptr<SetLinks> MakeSet(const std::vector<int>& ranks) override {
    const bool member = std::binary_search(ranks.begin(), ranks.end(), rank_);
    MPI_Comm communicator = MPI_COMM_NULL;
    HVPIPE_MPI(MPI_Comm_split(control_, member ? 0 : MPI_UNDEFINED, rank_, &communicator));
    return member ? std::make_unique<MpiSetLinks>(communicator) : nullptr;
  }

  void Free() override { HVPIPE_MPI(MPI_Comm_free(&control_)); }

 private:
  struct Sending {
    std::string bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  MPI_Comm control_ = MPI_COMM_NULL;
  std::list<Sending> sends_;
};

}  // namespace

std::unique_ptr<Links> MakeMpiLinks(MPI_Comm world) { return std::make_unique<MpiLinks>(world); }

}  // namespace hvpipe::named
