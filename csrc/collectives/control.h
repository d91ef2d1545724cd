// The exchange of control records: each rank tells all others what it will do next, so that differences are
// found.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/telemetry.h"
#include "collectives/collective.h"
#include "transport/transport.h"

namespace hvpipe {

// What a rank does next.
struct Record {
  std::uint64_t signature = 0;      // must be equal on all ranks
  std::uint64_t sequence = 0;       // of the operation, by Progress
  double samples = 0;               // in this rank's batch
  std::int32_t rank = 0;            // whose record this is; the exchange sets it
  std::uint32_t payload_bytes = 0;  // that travel with the record; equal where signatures are
  std::array<char, 96> what{};      // description of the operation
};
static_assert(sizeof(Record) == 128);

Record MakeRecord(std::uint64_t signature, std::uint64_t sequence, double samples, const std::string& what);

// The description of the last operation, by which all ranks leave together.
inline constexpr char kLeaving[] = "shutdown";

// Summarises the records of several ranks, in a size that does not grow with their number.
class RecordDigest {
 public:
  static constexpr std::size_t kMostRecords = 2;  // so that each rank finds one that differs from its own
  static constexpr std::size_t kLeastBytes = 16 + sizeof(Record);
  static constexpr std::size_t kMostBytes = 16 + kMostRecords * sizeof(Record);

  RecordDigest(const Record& record, std::uint64_t requests) : requests_(requests), records_{record} {}
  // From the beginning of a message.
  explicit RecordDigest(const char* message);

  std::size_t bytes() const { return 16 + kinds_ * sizeof(Record); }
  void WriteTo(char* message) const;
  // Of more ranks, some of which this one may have already.
  void Add(const RecordDigest& other);

  // The bits of all ranks, or-ed.
  std::uint64_t requests() const { return requests_; }
  // Of a rank that leaves, if there is one; else of the lowest rank.
  const Record& first() const { return records_[0]; }
  // One with another signature; null: all ranks agree.
  const Record* OtherThan(const Record& record) const;

 private:
  void Add(const Record& record);

  std::uint64_t requests_;
  std::uint64_t kinds_ = 1;                   // how many records there are
  std::array<Record, kMostRecords> records_;  // with different signatures
};

// Tells all ranks what each does next, in ceil(log2(ranks)) rounds (Bruck et al., 1997): a digest of the
// records, and of each rank its samples and payload, which mean something only if all ranks agree.
class ControlExchange : public Collective {
 public:
  // All ranks' payloads but one have at most so many bytes.
  static constexpr std::size_t kMostPayloadBytes = 28'672;

  // `payload` has mine.payload_bytes. `requests`: bits that this rank wants all ranks to see. `from_above`:
  // the message of the rank above, if this rank has received it already; else empty.
  ControlExchange(Transport& transport, Counters& counters, const Record& mine, std::uint64_t requests,
                  const void* payload, int tag, const std::vector<char>& from_above);

  bool Step() override;
  bool done() const override { return held_ == ranks_; }
  std::string Waiting() const override;
  // The rank from which the first message has not come.
  std::optional<int> Missing() const;
  int ranks() const { return ranks_; }

  // Call these only when done.
  //
  // Throw MismatchError with the descriptions of both ranks, unless all signatures are equal.
  void CheckAgreement() const;
  // The requests of all ranks, or-ed.
  std::uint64_t requests() const { return digest_.requests(); }
  // If all ranks agree: of each rank.
  double SamplesOf(int rank) const;
  char* PayloadOf(int rank) const { return EntryOf(rank) + sizeof(double); }

  // The first message of `rank`, which has begun an exchange that this rank has not. Empty if none has
  // arrived. The exchange must get it as `from_above`.
  static std::vector<char> TakeMessage(Transport& transport, int rank, int tag);
  // The record of the sender of such a message.
  static Record RecordIn(const std::vector<char>& message) { return RecordDigest(message.data()).first(); }

 private:
  static std::size_t EntryBytes(std::size_t payload_bytes);
  char* Entry(int index) const;
  char* EntryOf(int rank) const { return Entry((rank - rank_ + ranks_) % ranks_); }
  char* received() const { return Entry(ranks_); }
  void Take(int entries);

  Transport& transport_;
  Counters& counters_;
  const int rank_, ranks_, tag_;
  const Record mine_;
  RecordDigest digest_;
  bool has_above_;
  int held_ = 1;  // ranks heard of: rank, rank + 1, ...
  Ticket send_ = kNoTicket;
  Ticket receive_ = kNoTicket;
  const std::size_t entry_bytes_, most_bytes_;  // of an entry; of a message, also of ranks that disagree
  AlignedBuffer memory_;  // a digest, entries (number i is of rank (rank_ + i) % ranks_), a message received
};

// Called once an exchange has ended. Throws if ranks disagree.
using ExchangeCheck = std::function<void(const ControlExchange&)>;

// An all-reduce of a small array, which travels with the records. Its bits are those of DoublingSteps.
class GatheredAllReduce : public Collective {
 public:
  // `check` is called once the exchange has ended, and throws if ranks disagree. The exchange's payload is
  // what this rank adds.
  GatheredAllReduce(std::unique_ptr<ControlExchange> exchange, ExchangeCheck check, void* out,
                    std::size_t count, DType dtype)
      : exchange_(std::move(exchange)), check_(std::move(check)), out_(out), count_(count), dtype_(dtype) {}

  static bool Fits(int ranks, std::size_t bytes) {
    // A larger message needs a handshake in shared memory. With two ranks it is the only one.
    const std::size_t most = ranks == 2 ? 4096 - RecordDigest::kLeastBytes - sizeof(double) - 64 : 4096;
    return bytes <= most && static_cast<std::size_t>(ranks - 1) * bytes <= ControlExchange::kMostPayloadBytes;
  }

  bool Step() override;
  bool done() const override { return summed_; }
  std::string Waiting() const override { return exchange_->Waiting(); }
  std::vector<int> Ranks() const override { return exchange_->Ranks(); }

 private:
  const std::unique_ptr<ControlExchange> exchange_;
  const ExchangeCheck check_;
  void* const out_;
  const std::size_t count_;
  const DType dtype_;
  bool summed_ = false;
};

// An exchange, and beside it the collective that it checks. Ends with the exchange's error rather than with
// that of the collective, which may come from ranks that disagree.
class CheckedCollective : public Collective {
 public:
  CheckedCollective(std::unique_ptr<ControlExchange> exchange, ExchangeCheck check,
                    std::unique_ptr<Collective> collective)
      : exchange_(std::move(exchange)), check_(std::move(check)), collective_(std::move(collective)) {}

  bool Step() override;
  bool done() const override { return exchange_->done() && collective_->done(); }
  std::string Waiting() const override {
    return exchange_->done() ? collective_->Waiting() : exchange_->Waiting();
  }
  std::vector<int> Ranks() const override {
    return exchange_->done() ? collective_->Ranks() : exchange_->Ranks();
  }

 private:
  const std::unique_ptr<ControlExchange> exchange_;
  const ExchangeCheck check_;
  const std::unique_ptr<Collective> collective_;
  std::exception_ptr error_;  // of the collective, while the exchange is under way
};

// The error that this rank is at `what`, and another one at something else, or leaves.
Error DifferentCalls(int rank, const std::string& what, const Record& theirs);

// The error that `rank` and `other` are at different operations. `kind` is "Rank" or "Local rank".
Error Disagreement(const std::string& kind, int rank, const std::string& what, int other,
                   const std::string& others_what);

// FNV-1a: the same on all machines and compilers.
std::uint64_t Hash(const std::string& text);

}  // namespace hvpipe
