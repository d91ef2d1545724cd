// Exchanges control records and reports ranks that disagree.
#include "collectives/control.h"

#include <algorithm>
#include <cstring>

#include "collectives/butterfly.h"

namespace hvpipe {

Record MakeRecord(std::uint64_t signature, std::uint64_t sequence, double samples, const std::string& what) {
  Record record;
  record.signature = signature;
  record.sequence = sequence;
  record.samples = samples;
  std::memcpy(record.what.data(), what.data(), std::min(what.size(), record.what.size() - 1));
  return record;
}

ControlExchange::ControlExchange(Transport& transport, const Record& mine, const void* payload, int tag,
                                 const std::vector<char>& from_above)
    : RecordExchange(transport.rank(), transport.size()),
      transport_(transport),
      tag_(tag),
      has_above_(!from_above.empty()),
      entry_bytes_(EntryBytes(mine.payload_bytes)),
      slack_bytes_(kMostPayloadBytes + 8 * static_cast<std::size_t>(ranks_)),
      entries_(static_cast<std::size_t>(ranks_) * entry_bytes_ + slack_bytes_) {
  std::memcpy(Entry(0), &mine, sizeof mine);
  if (mine.payload_bytes > 0) std::memcpy(Entry(0) + sizeof mine, payload, mine.payload_bytes);
  if (!has_above_) return;
  std::memcpy(Entry(1), from_above.data(), from_above.size());
  Arrange(1, 1);
}

// Elements of a payload are at most 8 bytes large.
std::size_t ControlExchange::EntryBytes(std::size_t payload_bytes) {
  return sizeof(Record) + (payload_bytes + 7) / 8 * 8;
}

char* ControlExchange::Entry(int index) const {
  return static_cast<char*>(entries_.data()) + static_cast<std::size_t>(index) * entry_bytes_;
}

// A rank that sends entries has room for its own payload in each of them. Move them to their places here.
void ControlExchange::Arrange(int first, int entries) {
  char* const begin = Entry(first);
  Record sender;
  std::memcpy(&sender, begin, sizeof sender);
  const std::size_t theirs = EntryBytes(sender.payload_bytes);
  if (theirs == entry_bytes_) return;
  const auto move = [&](int index) {
    std::memmove(begin + static_cast<std::size_t>(index) * entry_bytes_,
                 begin + static_cast<std::size_t>(index) * theirs, sizeof(Record));
  };
  for (int i = 1; i < entries; ++i) move(theirs > entry_bytes_ ? i : entries - i);
}

// In each round a rank sends the entries that it holds to rank - held_ and receives as many from rank +
// held_.
bool ControlExchange::Step() {
  bool moved = false;
  while (held_ < ranks_) {
    const int take = std::min(held_, ranks_ - held_);
    const std::size_t bytes = static_cast<std::size_t>(take) * entry_bytes_;
    if (send_ == kNoTicket && receive_ == kNoTicket) {
      const int above = (rank_ + held_) % ranks_;
      const int below = (rank_ - held_ + ranks_) % ranks_;
      if (held_ > 1 || !has_above_)
        receive_ = transport_.Irecv(Entry(held_), bytes + slack_bytes_, above, tag_);
      send_ = transport_.Isend(entries_.data(), bytes, below, tag_);
      moved = true;
    }
    if (transport_.TestAndForget(receive_)) Arrange(held_, take);
    (void)transport_.TestAndForget(send_);
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

const Record& ControlExchange::of(int rank) const { return *reinterpret_cast<const Record*>(EntryOf(rank)); }

bool GatheredAllReduce::Step() {
  const bool moved = exchange_->Step();
  if (summed_ || !exchange_->done()) return moved;
  check_(*exchange_);
  std::vector<char*> arrays;
  for (int rank = 0; rank < exchange_->ranks(); ++rank) arrays.push_back(exchange_->PayloadOf(rank));
  SumAsDoubling(out_, arrays, dtype_, count_);
  return summed_ = true;
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

std::vector<char> TakeEntry(Transport& transport, int rank, int tag) {
  if (!transport.Probe(rank, tag)) return {};
  std::vector<char> entry(ControlExchange::kMostEntryBytes);
  const Ticket ticket = transport.Irecv(entry.data(), entry.size(), rank, tag);
  while (!transport.Test(ticket)) transport.Poll();
  Record record;
  std::memcpy(&record, entry.data(), sizeof record);
  entry.resize(sizeof record + record.payload_bytes);
  return entry;
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
