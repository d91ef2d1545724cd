// Finds the non-zero rows of a table and lays out those of all ranks.
#include "collectives/table_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>

#include "base/error.h"

namespace hvpipe {
namespace {

bool IsZero(const char* row, std::size_t bytes) {
  std::uint64_t found = 0;
  std::size_t at = 0;
  // Block by block, so that the compiler vectorises. A non-zero row usually ends the loop in its first block.
  constexpr std::size_t kBlock = 256;
  for (; at + kBlock <= bytes && found == 0; at += kBlock) {
    std::uint64_t words[kBlock / sizeof(std::uint64_t)];
    std::memcpy(words, row + at, kBlock);
    for (const std::uint64_t word : words) found |= word;
  }
  for (std::uint64_t word = 0; at + sizeof word <= bytes && found == 0; at += sizeof word) {
    std::memcpy(&word, row + at, sizeof word);
    found |= word;
  }
  for (; at < bytes && found == 0; ++at) found |= static_cast<unsigned char>(row[at]);
  return found == 0;
}

}  // namespace

TableRows::TableRows(std::size_t rows, std::size_t elements, DType wire, bool from_gpu)
    : elements_(elements),
      wire_(wire),
      from_gpu_(from_gpu),
      flags_(rows),
      buffer_(std::make_shared<AlignedBuffer>()) {}

void TableRows::Pack(const void* table, DType type, double scale) {
  const auto* const first = static_cast<const char*>(table);
  const std::size_t row_bytes = elements_ * SizeOf(type);
  own_.clear();
  for (std::size_t row = 0; row < rows(); ++row) {
    const bool zero = IsZero(first + row * row_bytes, row_bytes);
    flags_[row] = zero ? 0 : kFlag;
    if (!zero) own_.push_back(row);
  }
  MakeRoom(own_.size());
  for (std::size_t place = 0; place < own_.size(); ++place) {
    ScaleAndCast(first + own_[place] * row_bytes, type, Row(place), wire_, elements_, scale);
  }
}

void TableRows::PackSlices(const std::int64_t* slices, std::size_t count, const void* values, DType type,
                           double scale) {
  const auto number = [&](std::size_t slice) { return slices[slice]; };
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return number(a) < number(b); });
  const auto end = static_cast<std::int64_t>(rows());
  while (from_gpu_ && count > 0 && number(order[count - 1]) >= end) --count;
  if (count > 0 && number(order[count - 1]) >= end) {
    throw Error("The rows of a gradient should be numbered from 0 to " + std::to_string(rows() - 1) +
                    ", the last row of its table. Received: row " + std::to_string(number(order[count - 1])),
                ErrorKind::kUsage);
  }
  std::fill(flags_.begin(), flags_.end(), 0);
  own_.clear();
  MakeRoom(std::min(count, rows()));
  const auto* const given = static_cast<const char*>(values);
  const std::size_t row_bytes = elements_ * SizeOf(type);
  std::vector<char> sum(row_bytes);
  std::size_t at = 0;
  while (at < count && number(order[at]) < 0) ++at;
  while (at < count) {
    const std::int64_t row = number(order[at]);
    const char* found = given + order[at] * row_bytes;
    if (++at < count && number(order[at]) == row) {
      std::memcpy(sum.data(), found, row_bytes);
      found = sum.data();
      for (; at < count && number(order[at]) == row; ++at) {
        AddInto(sum.data(), given + order[at] * row_bytes, type, elements_);
      }
    }
    if (IsZero(found, row_bytes)) continue;
    ScaleAndCast(found, type, Row(own_.size()), wire_, elements_, scale);
    own_.push_back(static_cast<std::size_t>(row));
    flags_[own_.back()] = kFlag;
  }
}

void TableRows::MakeRoom(std::size_t rows) {
  if (buffer_.use_count() > 1 || buffer_->bytes() < rows * RowBytes()) {
    buffer_ = Grown(rows);
  } else {
    // Pairs with the release by the thread that gave the buffer back.
    std::atomic_thread_fence(std::memory_order_acquire);
  }
}

void TableRows::FindPresent() {
  present_.clear();
  for (std::size_t row = 0; row < rows(); ++row) {
    if (flags_[row] != 0) present_.push_back(row);
  }
  if (present_.empty()) present_.push_back(0);
}

void* TableRows::Marks(int rank, int ranks) {
  marks_.assign(static_cast<std::size_t>(ranks) * Words(), 0);
  std::uint16_t* const own = marks_.data() + static_cast<std::size_t>(rank) * Words();
  for (const std::size_t row : own_) own[row / 16] |= static_cast<std::uint16_t>(1u << row % 16);
  return marks_.data();
}

bool TableRows::LayOutMarked(int rank, int ranks) {
  const auto size = static_cast<std::size_t>(ranks);
  std::vector<std::size_t> held(size);
  std::fill(flags_.begin(), flags_.end(), 0);
  for (std::size_t at = 0; at < marks_.size(); ++at) {
    const std::size_t first = at % Words() * 16;
    for (unsigned left = marks_[at]; left != 0; left &= left - 1) {
      flags_[first + static_cast<std::size_t>(__builtin_ctz(left))] = kFlag;
      ++held[at / Words()];
    }
  }
  FindPresent();
  most_ = *std::max_element(held.begin(), held.end());
  // A rank sends (size - 1) * most_ rows to gather, and 2 (size - 1) / size of the rows present to sum.
  if (most_ == 0 || size * most_ >= 2 * present_.size()) {
    LayOutPresent();
    return false;
  }
  const std::size_t bytes = size * most_ * RowBytes();
  if (gathered_ == nullptr || gathered_->bytes() < bytes) {
    gathered_ = std::make_unique<AlignedBuffer>(std::min(bytes + bytes / 4, 2 * rows() * RowBytes()));
  }
  char* const own =
      static_cast<char*>(gathered_->data()) + static_cast<std::size_t>(rank) * most_ * RowBytes();
  const std::size_t own_bytes = own_.size() * RowBytes();
  if (own_bytes > 0) std::memcpy(own, buffer_->data(), own_bytes);
  std::memset(own + own_bytes, 0, most_ * RowBytes() - own_bytes);  // sent, not summed
  return true;
}

void TableRows::SumGathered() {
  if (buffer_->bytes() < present_.size() * RowBytes()) buffer_ = Grown(present_.size());
  const std::size_t ranks = marks_.size() / Words();
  std::vector<const char*> next(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    next[rank] = static_cast<const char*>(gathered_->data()) + rank * most_ * RowBytes();
  }
  for (std::size_t place = 0; place < present_.size(); ++place) {
    bool first = true;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (!Marked(rank, present_[place])) continue;
      if (first) {
        std::memcpy(Row(place), next[rank], RowBytes());
      } else {
        AddInto(Row(place), next[rank], wire_, elements_);
      }
      first = false;
      next[rank] += RowBytes();
    }
  }
}

void TableRows::LayOutRows() {
  FindPresent();
  LayOutPresent();
}

void TableRows::LayOutPresent() {
  const std::shared_ptr<AlignedBuffer> packed_in = buffer_;
  if (buffer_->bytes() < present_.size() * RowBytes()) buffer_ = Grown(present_.size());
  const char* const packed = static_cast<const char*>(packed_in->data());
  // From the back. Rows only move towards the back, so no row is overwritten before it was moved.
  std::size_t left = own_.size();
  for (std::size_t place = present_.size(); place-- > 0;) {
    if (left > 0 && own_[left - 1] == present_[place]) {
      --left;
      const char* const from = packed + left * RowBytes();
      if (from != Row(place)) std::memmove(Row(place), from, RowBytes());
    } else {
      std::memset(Row(place), 0, RowBytes());
    }
  }
}

// A quarter larger than needed, because batches touch about the same number of rows: the buffer then rarely
// grows again.
std::shared_ptr<AlignedBuffer> TableRows::Grown(std::size_t rows) const {
  return std::make_shared<AlignedBuffer>(std::min(this->rows(), rows + rows / 4) * RowBytes());
}

void TableRows::Unpack(void* table, DType type) const {
  auto* const first = static_cast<char*>(table);
  const std::size_t row_bytes = elements_ * SizeOf(type);
  std::size_t next = 0;
  for (std::size_t place = 0; place < present_.size(); ++place) {
    const std::size_t row = present_[place];
    std::memset(first + next * row_bytes, 0, (row - next) * row_bytes);
    Cast(Row(place), wire_, first + row * row_bytes, type, elements_);
    next = row + 1;
  }
  std::memset(first + next * row_bytes, 0, (rows() - next) * row_bytes);
}

}  // namespace hvpipe
