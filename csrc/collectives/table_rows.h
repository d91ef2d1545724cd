// The gradient of a table (an Embedding's), of which a batch touches few rows: the others do not travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/bucket.h"

namespace hvpipe {

// A rank packs its rows that are not zero. All ranks sum their flags of which rows these are, make room for
// the rows of others, and then sum the same rows. What they unpack is the sum of the whole tables.
//
//   rank 0  row 1, row 4          flags 0 1 0 0 1    row 1,   0,   row 4    sum of 1, 2, 4
//   rank 1  row 2, row 4                0 0 1 0 1      0,   row 2, row 4    (others: zeros)
class TableRows {
 public:
  // `rows` rows of `elements` each, which travel as `wire`.
  TableRows(std::size_t rows, std::size_t elements, DType wire);

  // Takes the rows that are not zero, times `scale`, cast.
  void Pack(const void* table, DType type, double scale);
  // One for each row, not zero where a rank has it; to be summed over the ranks in place.
  void* flags() { return flags_.data(); }
  std::size_t rows() const { return flags_.size(); }
  static constexpr DType kFlagType = DType::kFloat16;
  // Lays out the rows that any rank has, in order.
  void MakeRoom();
  // What is laid out, to be summed over the ranks in place: at least one row.
  void* data() const { return buffer_->data(); }
  std::size_t count() const { return present_.size() * elements_; }
  // The buffer, if that is the whole table; whoever still holds it at the next Pack keeps it. Else null.
  std::shared_ptr<AlignedBuffer> Whole() const { return present_.size() == rows() ? buffer_ : nullptr; }
  // The whole table: the rows laid out, cast, and zeros.
  void Unpack(void* table, DType type) const;

 private:
  static constexpr std::uint16_t kFlag = 0x3c00;  // 1.0; so many ranks that it overflows leave it not zero
  std::size_t RowBytes() const { return elements_ * SizeOf(wire_); }
  char* Row(std::size_t place) const { return static_cast<char*>(buffer_->data()) + place * RowBytes(); }
  std::shared_ptr<AlignedBuffer> Grown(std::size_t rows) const;

  std::size_t elements_;
  DType wire_;
  std::vector<std::uint16_t> flags_;
  std::vector<std::size_t> own_, present_;  // numbers of rows, in order
  std::shared_ptr<AlignedBuffer> buffer_;
};

}  // namespace hvpipe
