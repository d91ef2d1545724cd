// Exchanges control records and reports ranks that disagree.
#include "collectives/control.h"

#include <algorithm>
#include <cstring>

namespace hvpipe {

Record MakeRecord(std::uint64_t signature, std::uint64_t sequence, double samples, const std::string& what) {
  Record record;
  record.signature = signature;
  record.sequence = sequence;
  record.samples = samples;
  std::memcpy(record.what.data(), what.data(), std::min(what.size(), record.what.size() - 1));
  return record;
}

ControlExchange::ControlExchange(Transport& transport, const Record& mine, int tag,
                                 const std::optional<Record>& from_above)
    : RecordExchange(transport.rank(), transport.size()),
      transport_(transport),
      tag_(tag),
      has_above_(from_above.has_value()) {
  records_.resize(static_cast<std::size_t>(ranks_));
  records_[0] = mine;
  if (has_above_) records_[1] = *from_above;
}

// In each round a rank sends the records that it holds to rank - held_ and receives as many from rank +
// held_.
bool ControlExchange::Step() {
  bool moved = false;
  while (held_ < ranks_) {
    const int take = std::min(held_, ranks_ - held_);
    const auto bytes = static_cast<std::size_t>(take) * sizeof(Record);
    if (send_ == kNoTicket && receive_ == kNoTicket) {
      const int above = (rank_ + held_) % ranks_;
      const int below = (rank_ - held_ + ranks_) % ranks_;
      if (held_ > 1 || !has_above_)
        receive_ = transport_.Irecv(&records_[static_cast<std::size_t>(held_)], bytes, above, tag_);
      send_ = transport_.Isend(records_.data(), bytes, below, tag_);
      moved = true;
    }
    if (receive_ != kNoTicket && transport_.Test(receive_)) receive_ = kNoTicket;
    if (send_ != kNoTicket && transport_.Test(send_)) send_ = kNoTicket;
    if (receive_ != kNoTicket || send_ != kNoTicket) return moved;
    held_ += take;
    moved = true;
  }
  return moved;
}

std::string ControlExchange::Waiting() const {
  const int above = (rank_ + held_) % ranks_;
  const int below = (rank_ - held_ + ranks_) % ranks_;
  return receive_ != kNoTicket ? "rank " + std::to_string(above) + " to say what it does next"
                               : "rank " + std::to_string(below) + " to hear what this rank does next";
}

std::optional<int> ControlExchange::Missing() const {
  if (held_ > 1 || receive_ == kNoTicket) return std::nullopt;
  return (rank_ + 1) % ranks_;
}

const Record& ControlExchange::of(int rank) const {
  return records_[static_cast<std::size_t>((rank - rank_ + ranks_) % ranks_)];
}

bool CheckedCollective::Step() {
  bool moved = false;
  if (!exchange_->done()) {
    moved = exchange_->Step();
    if (exchange_->done()) check_(*exchange_);
  }
  if (error_ && exchange_->done()) std::rethrow_exception(error_);
  if (error_ || collective_->done()) return moved;
  try {
    return collective_->Step() || moved;
  } catch (...) {
    if (exchange_->done()) throw;
    error_ = std::current_exception();
    return true;
  }
}

std::uint64_t RecordExchange::requests() const {
  std::uint64_t all = 0;
  for (int rank = 0; rank < ranks_; ++rank) all |= of(rank).requests;
  return all;
}

void RecordExchange::CheckAgreement() const {
  const Record& mine = of(rank_);
  std::optional<int> other;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (of(rank).signature == mine.signature) continue;
    if (!other || of(rank).signature == Hash(kLeaving)) other = rank;
  }
  if (other) throw DifferentCalls(rank_, mine.what.data(), *other, of(*other));
}

Error DifferentCalls(int rank, const std::string& what, int other, const Record& theirs) {
  if (theirs.signature != Hash(kLeaving)) return Disagreement("Rank", rank, what, other, theirs.what.data());
  const std::string number = std::to_string(other);
  return Error(
      "Rank " + number +
          " has left the others, which still need it: every rank should make the same calls, and end "
          "with the others. Received: rank " +
          number + " is at: " + theirs.what.data() + ". Rank " + std::to_string(rank) + " is at: " + what +
          ".",
      ErrorKind::kPeer);
}

Error Disagreement(const std::string& kind, int rank, const std::string& what, int other,
                   const std::string& others_what) {
  return Error(
      "The ranks disagree about what comes next: all should make the same calls in the same order. "
      "Look for code that only some ranks run, and for data of another length on some. Received: " +
          kind + " " + std::to_string(rank) + " is at: " + what + ". " + kind + " " + std::to_string(other) +
          " is at: " + others_what + ".",
      ErrorKind::kMismatch);
}

std::optional<Record> TakeRecord(Transport& transport, int rank, int tag) {
  if (!transport.Probe(rank, tag)) return std::nullopt;
  Record record;
  const Ticket ticket = transport.Irecv(&record, sizeof record, rank, tag);
  while (!transport.Test(ticket)) transport.Poll();
  return record;
}

std::uint64_t Hash(const std::string& text) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 1099511628211ull;
  }
  return hash;
}

}  // namespace hvpipe
