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

#include "base/error.h"
#include "collectives/collective.h"
#include "transport/transport.h"

namespace hvpipe {

struct Record {
  std::uint64_t signature = 0;  // of the next operation; must be equal on all ranks
  std::uint64_t sequence = 0;   // of the next operation, by Progress
  double samples = 0;           // in this rank's batch
  std::uint64_t requests = 0;   // bits that this rank wants all ranks to see
  std::array<char, 96> what{};  // description of the next operation
};
static_assert(sizeof(Record) == 128);

Record MakeRecord(std::uint64_t signature, std::uint64_t sequence, double samples, const std::string& what);

// Gathers one record of each rank on all ranks.
class RecordExchange : public Collective {
 public:
  RecordExchange(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

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

// In ceil(log2(size)) rounds (Bruck et al., 1997).
class ControlExchange : public RecordExchange {
 public:
  // `from_above`: the record of the rank above, if this rank has received it already.
  ControlExchange(Transport& transport, const Record& mine, int tag, const std::optional<Record>& from_above);

  bool Step() override;
  bool done() const override { return held_ == ranks_; }
  std::string Waiting() const override;
  const Record& of(int rank) const override;
  std::optional<int> Missing() const override;

 private:
  Transport& transport_;
  int tag_;
  bool has_above_;
  int held_ = 1;  // records gathered: those of rank, rank + 1, ...
  Ticket send_ = kNoTicket;
  Ticket receive_ = kNoTicket;
  std::vector<Record> records_;  // records_[i] comes from rank (rank_ + i) % ranks_
};

// An exchange, and beside it the collective that it checks. Ends with the exchange's error rather than with
// that of the collective, which may come from ranks that disagree.
class CheckedCollective : public Collective {
 public:
  // `check` is called once the exchange has ended, and throws if ranks disagree.
  using Check = std::function<void(const RecordExchange&)>;
  CheckedCollective(std::unique_ptr<RecordExchange> exchange, Check check,
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
  const Check check_;
  const std::unique_ptr<Collective> collective_;
  std::exception_ptr error_;  // of the collective, while the exchange is under way
};

// Receive the first record of an exchange that `rank` has begun and this rank has not. Empty if none has
// arrived. The exchange must get it as `from_above`.
std::optional<Record> TakeRecord(Transport& transport, int rank, int tag);

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
