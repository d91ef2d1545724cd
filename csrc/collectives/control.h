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
#include "collectives/collective.h"
#include "transport/transport.h"

namespace hvpipe {

struct Record {
  std::uint64_t signature = 0;      // of the next operation; must be equal on all ranks
  std::uint64_t sequence = 0;       // of the next operation, by Progress
  double samples = 0;               // in this rank's batch
  std::uint64_t requests = 0;       // bits that this rank wants all ranks to see
  std::uint32_t payload_bytes = 0;  // that travel with the record
  std::array<char, 92> what{};      // description of the next operation
};
static_assert(sizeof(Record) == 128);

Record MakeRecord(std::uint64_t signature, std::uint64_t sequence, double samples, const std::string& what);

// Gathers one record of each rank on all ranks.
class RecordExchange : public Collective {
 public:
  RecordExchange(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  // The record of `rank`. Call only when done.
  virtual const Record& of(int rank) const = 0;
  // The requests of all ranks, or-ed. Call only when done.
  std::uint64_t requests() const;
  // Throw MismatchError with the descriptions of both ranks, unless all signatures are equal.
  void CheckAgreement() const;
  // A rank from which nothing has come, if that is known.
  virtual std::optional<int> Missing() const { return std::nullopt; }

 protected:
  const int rank_;
  const int ranks_;
};

// Called once an exchange has ended. Throws if ranks disagree.
using RecordCheck = std::function<void(const RecordExchange&)>;

// In ceil(log2(size)) rounds (Bruck et al., 1997). A rank's record and payload are one entry. Ranks that
// disagree may have payloads of different sizes; then only their records mean anything.
class ControlExchange : public RecordExchange {
 public:
  // All ranks' payloads but one have at most so many bytes.
  static constexpr std::size_t kMostPayloadBytes = 28'672;
  static constexpr std::size_t kMostEntryBytes = sizeof(Record) + kMostPayloadBytes;

  // `payload` has mine.payload_bytes. `from_above`: the entry of the rank above, if this rank has received it
  // already; else empty.
  ControlExchange(Transport& transport, const Record& mine, const void* payload, int tag,
                  const std::vector<char>& from_above);

  bool Step() override;
  bool done() const override { return held_ == ranks_; }
  std::string Waiting() const override;
  const Record& of(int rank) const override;
  std::optional<int> Missing() const override;
  // The payload of `rank`. Call only when done, and if all ranks agree.
  char* PayloadOf(int rank) { return EntryOf(rank) + sizeof(Record); }

 private:
  static std::size_t EntryBytes(std::size_t payload_bytes);
  char* Entry(int index) const;
  char* EntryOf(int rank) const { return Entry((rank - rank_ + ranks_) % ranks_); }
  void Arrange(int first, int entries);

  Transport& transport_;
  int tag_;
  bool has_above_;
  int held_ = 1;  // entries gathered: those of rank, rank + 1, ...
  Ticket send_ = kNoTicket;
  Ticket receive_ = kNoTicket;
  const std::size_t entry_bytes_, slack_bytes_;  // so that payloads of ranks that disagree fit, too
  AlignedBuffer entries_;                        // number i comes from rank (rank_ + i) % ranks_
};

// An all-reduce of a small array, which travels with the records. Its bits are those of DoublingSteps.
class GatheredAllReduce : public Collective {
 public:
  // `check` is called once the exchange has ended, and throws if ranks disagree. The exchange's payload is
  // what this rank adds.
  GatheredAllReduce(std::unique_ptr<ControlExchange> exchange, RecordCheck check, void* out,
                    std::size_t count, DType dtype)
      : exchange_(std::move(exchange)), check_(std::move(check)), out_(out), count_(count), dtype_(dtype) {}

  static bool Fits(int ranks, std::size_t bytes) {
    // A larger message needs a handshake in shared memory. With two ranks it is the only one.
    const std::size_t most = ranks == 2 ? 4096 - sizeof(Record) - 64 : 4096;
    return bytes <= most && static_cast<std::size_t>(ranks - 1) * bytes <= ControlExchange::kMostPayloadBytes;
  }

  bool Step() override;
  bool done() const override { return summed_; }
  std::string Waiting() const override { return exchange_->Waiting(); }
  std::vector<int> Ranks() const override { return exchange_->Ranks(); }

 private:
  const std::unique_ptr<ControlExchange> exchange_;
  const RecordCheck check_;
  void* const out_;
  const std::size_t count_;
  const DType dtype_;
  bool summed_ = false;
};

// An exchange, and beside it the collective that it checks. Ends with the exchange's error rather than with
// that of the collective, which may come from ranks that disagree.
class CheckedCollective : public Collective {
 public:
  CheckedCollective(std::unique_ptr<RecordExchange> exchange, RecordCheck check,
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
  const std::unique_ptr<RecordExchange> exchange_;
  const RecordCheck check_;
  const std::unique_ptr<Collective> collective_;
  std::exception_ptr error_;  // of the collective, while the exchange is under way
};

// Receive the first entry of an exchange that `rank` has begun and this rank has not. Empty if none has
// arrived. The exchange must get it as `from_above`.
std::vector<char> TakeEntry(Transport& transport, int rank, int tag);

// What a rank that leaves the others is at; all ranks leave together.
inline constexpr char kLeaving[] = "shutdown";

// The error that this rank is at `what`, and the rank `other` at something else, or leaves.
Error DifferentCalls(int rank, const std::string& what, int other, const Record& theirs);

// The error that `rank` and `other` are at different operations. `kind` is "Rank" or "Local rank".
Error Disagreement(const std::string& kind, int rank, const std::string& what, int other,
                   const std::string& others_what);

// FNV-1a: the same on all machines and compilers.
std::uint64_t Hash(const std::string& text);

}  // namespace hvpipe
