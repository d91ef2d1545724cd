// A record from every rank to every rank: what each is about to do, so that they find out when they differ.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "collectives/collective.h"
#include "collectives/transport.h"

namespace hvpipe {

struct Record {
  std::uint64_t signature = 0;   // of what the rank is about to do; must be the same on all
  double samples = 0;            // of this rank's batch
  std::array<char, 112> what{};  // the same in words
};
static_assert(sizeof(Record) == 128);

Record MakeRecord(std::uint64_t signature, double samples, const std::string& what);

// All-gather of one record per rank in ceil(log2(size)) rounds (Bruck et al., 1997).
class ControlExchange : public Collective {
 public:
  ControlExchange(Transport& transport, const Record& mine, int tag);

  bool Step() override;
  bool done() const override { return held_ == ranks_; }
  std::string Waiting() const override;

  // The record of `rank`, once done.
  const Record& of(int rank) const;
  // Throws MismatchError with what each rank is at, unless all signatures are equal.
  void CheckAgreement() const;

 private:
  Transport& transport_;
  int tag_;
  int rank_;
  int ranks_;
  int held_ = 1;  // records gathered: those of rank, rank + 1, ...
  Ticket send_ = kNoTicket;
  Ticket receive_ = kNoTicket;
  std::vector<Record> records_;  // records_[i] is of rank (rank_ + i) % ranks_
};

// The first record of an exchange that `rank` has begun and this rank has not, if it has come; it is then
// taken, so the exchange can no longer succeed.
std::optional<Record> TakeRecord(Transport& transport, int rank, int tag);

// What to throw where `rank` is at `what` and `other` at something else; `kind` is "Rank" or "Local rank".
Error Disagreement(const std::string& kind, int rank, const std::string& what, int other,
                   const std::string& others_what);

// FNV-1a, stable across machines and compilers.
std::uint64_t Hash(const std::string& text);

}  // namespace hvpipe
