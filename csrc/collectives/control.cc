// Exchanges control records and reports ranks that disagree.
#include "collectives/control.h"

#include <algorithm>
#include <cstring>

#include "collectives/butterfly.h"

namespace hvpipe {
namespace {

Record WithRank(int rank, Record record) {
  record.rank = rank;
  return record;
}

}  // namespace

Record MakeRecord(std::uint64_t signature, std::uint64_t sequence, double samples, const std::string& what) {
  Record record;
  record.signature = signature;
  record.sequence = sequence;
  record.samples = samples;
  std::memcpy(record.what.data(), what.data(), std::min(what.size(), record.what.size() - 1));
  return record;
}

RecordDigest::RecordDigest(const char* message) {
  std::memcpy(&requests_, message, 8);
  std::memcpy(&kinds_, message + 8, 8);
  if (kinds_ < 1 || kinds_ > kMostRecords) throw Error("internal: this is no message of an agreement");
  std::memcpy(records_.data(), message + 16, kinds_ * sizeof(Record));
}

void RecordDigest::WriteTo(char* message) const {
  std::memcpy(message, &requests_, 8);
  std::memcpy(message + 8, &kinds_, 8);
  std::memcpy(message + 16, records_.data(), kinds_ * sizeof(Record));
}

void RecordDigest::Add(const RecordDigest& other) {
  requests_ |= other.requests_;
  for (std::size_t i = 0; i < other.kinds_; ++i) Add(other.records_[i]);
}

// Keeps the first ones of different signatures. So it does not matter in which order they are added.
void RecordDigest::Add(const Record& record) {
  if (kinds_ == 1 && record.signature == first().signature) {
    if (record.rank < first().rank) records_[0] = record;
    return;
  }
  std::vector<Record> all(records_.begin(), records_.begin() + static_cast<std::ptrdiff_t>(kinds_));
  all.push_back(record);
  std::sort(all.begin(), all.end(), [leaving = Hash(kLeaving)](const Record& a, const Record& b) {
    return std::make_pair(a.signature != leaving, a.rank) < std::make_pair(b.signature != leaving, b.rank);
  });
  kinds_ = 0;
  for (const Record& each : all) {
    const bool is_new = kinds_ == 0 || each.signature != first().signature;
    if (is_new && kinds_ < kMostRecords) records_[kinds_++] = each;
  }
}

const Record* RecordDigest::OtherThan(const Record& record) const {
  if (first().signature != record.signature) return &first();
  return kinds_ > 1 ? &records_[1] : nullptr;
}

ControlExchange::ControlExchange(Transport& transport, Counters& counters, const Record& mine,
                                 std::uint64_t requests, const void* payload, int tag,
                                 const std::vector<char>& from_above)
    : transport_(transport),
      counters_(counters),
      rank_(transport.rank()),
      ranks_(transport.size()),
      tag_(tag),
      mine_(WithRank(rank_, mine)),
      digest_(mine_, requests),
      has_above_(!from_above.empty()),
      entry_bytes_(EntryBytes(mine.payload_bytes)),
      most_bytes_(RecordDigest::kMostBytes + kMostPayloadBytes + 16 * static_cast<std::size_t>(ranks_)),
      memory_(RecordDigest::kMostBytes + static_cast<std::size_t>(ranks_) * entry_bytes_ + most_bytes_) {
  std::memcpy(Entry(0), &mine.samples, sizeof mine.samples);
  if (mine.payload_bytes > 0) std::memcpy(PayloadOf(rank_), payload, mine.payload_bytes);
  std::copy(from_above.begin(), from_above.end(), received());
}

// A number of samples and a payload, whose elements are at most 8 bytes large.
std::size_t ControlExchange::EntryBytes(std::size_t payload_bytes) {
  return sizeof(double) + (payload_bytes + 7) / 8 * 8;
}

char* ControlExchange::Entry(int index) const {
  return static_cast<char*>(memory_.data()) + RecordDigest::kMostBytes +
         static_cast<std::size_t>(index) * entry_bytes_;
}

// If ranks disagree, entries may have another size, or are not sent. Nobody looks at them.
void ControlExchange::Take(int entries) {
  const RecordDigest theirs(received());
  digest_.Add(theirs);
  if (digest_.OtherThan(mine_) != nullptr) return;
  std::memcpy(Entry(held_), received() + theirs.bytes(), static_cast<std::size_t>(entries) * entry_bytes_);
}

// In each round a rank sends the entries that it holds to rank - held_ and receives as many from rank +
// held_.
bool ControlExchange::Step() {
  bool moved = false;
  while (held_ < ranks_) {
    const int take = std::min(held_, ranks_ - held_);
    if (send_ == kNoTicket && receive_ == kNoTicket) {
      const int above = (rank_ + held_) % ranks_;
      const int below = (rank_ - held_ + ranks_) % ranks_;
      const std::size_t head = digest_.bytes();
      const std::size_t entries = digest_.OtherThan(mine_) == nullptr ? static_cast<std::size_t>(take) : 0;
      digest_.WriteTo(Entry(0) - head);
      send_ = transport_.Isend(Entry(0) - head, head + entries * entry_bytes_, below, tag_);
      ++counters_.messages_sent;
      if (held_ == 1 && has_above_) {
        Take(1);
      } else {
        receive_ = transport_.Irecv(received(), most_bytes_, above, tag_);
      }
      moved = true;
    }
    if (transport_.TestAndForget(receive_)) Take(take);
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

double ControlExchange::SamplesOf(int rank) const {
  double samples = 0;
  std::memcpy(&samples, EntryOf(rank), sizeof samples);
  return samples;
}

void ControlExchange::CheckAgreement() const {
  if (const Record* const other = digest_.OtherThan(mine_))
    throw DifferentCalls(rank_, mine_.what.data(), *other);
}

std::vector<char> ControlExchange::TakeMessage(Transport& transport, int rank, int tag) {
  if (!transport.Probe(rank, tag)) return {};
  std::vector<char> message(RecordDigest::kMostBytes + EntryBytes(kMostPayloadBytes));
  const Ticket ticket = transport.Irecv(message.data(), message.size(), rank, tag);
  while (!transport.Test(ticket)) transport.Poll();
  return message;
}

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

Error DifferentCalls(int rank, const std::string& what, const Record& theirs) {
  if (theirs.signature != Hash(kLeaving))
    return Disagreement("Rank", rank, what, theirs.rank, theirs.what.data());
  const std::string number = std::to_string(theirs.rank);
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

std::uint64_t Hash(const std::string& text) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 1099511628211ull;
  }
  return hash;
}

}  // namespace hvpipe
