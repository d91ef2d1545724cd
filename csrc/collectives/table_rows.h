// The gradient of a table, for example of an Embedding. A batch touches few rows; the others are not sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/dtype.h"
#include "base/vector_loops.h"

namespace hvpipe {

// Each rank packs its non-zero rows. All ranks sum flags that mark these rows, then lay out the rows that any
// rank has, and sum them. The result is the sum of the whole tables.
//
//   rank 0  row 1, row 4          flags 0 1 0 0 1    row 1,   0,   row 4    sum of 1, 2, 4
//   rank 1  row 2, row 4                0 0 1 0 1      0,   row 2, row 4    (others: zeros)
//
// Ranks with few rows in common would send many of these zeros. In a ring of up to kMostMarked ranks they
// gather marks instead of flags: a bit for each row of each rank. Then they gather the rows of each rank and
// sum them in rank order, if that is less to send.
class TableRows {
 public:
  // The marks of more ranks are more bytes than the flags.
  static constexpr int kMostMarked = 31;

  // `rows` rows of `elements` elements, which are sent as `wire`. With `from_gpu`, PackSlices ignores numbers
  // that are too large, as TensorFlow does on GPUs.
  TableRows(std::size_t rows, std::size_t elements, DType wire, bool from_gpu = false);

  // Pack the non-zero rows * `scale`, cast to the wire type.
  void Pack(const void* table, DType type, double scale);
  // The same for a table that is zero but for `slices`: `count` row numbers, and a row for each. Rows with
  // the same number are summed in their order; a negative number counts for nothing, as in TensorFlow. Throws
  // before it changes anything if a number is too large.
  void PackSlices(const std::int64_t* slices, std::size_t count, const void* values, DType type,
                  double scale);
  // One flag per row, not 0 if this rank has the row. To be summed over the ranks in place.
  void* flags() { return flags_.data(); }
  std::size_t rows() const { return flags_.size(); }
  static constexpr DType kFlagType = DType::kFloat16;
  // Lay out the rows that any rank has, in order. Call after the flags were summed.
  void LayOutRows();

  // The marks of all ranks, with those of this rank set. To be gathered in place, as elements of kFlagType.
  void* Marks(int rank, int ranks);
  std::size_t marks_count() const { return marks_.size(); }
  // Call after the marks were gathered. True: gather `gathered` in place, then call SumGathered. False: sum
  // `data`, as after LayOutRows.
  bool LayOutMarked(int rank, int ranks);
  void* gathered() const { return gathered_->data(); }
  std::size_t gathered_count() const { return marks_.size() / Words() * most_ * elements_; }
  void SumGathered();

  // The rows laid out, at least one. To be summed over the ranks in place.
  void* data() const { return buffer_->data(); }
  std::size_t count() const { return present_.size() * elements_; }
  // The buffer if it holds all rows of the table, else null. If someone still holds it at the next
  // Pack, a new buffer is made.
  std::shared_ptr<AlignedBuffer> WholeTable() const { return present_.size() == rows() ? buffer_ : nullptr; }
  // Write the whole table: the rows laid out, cast, and zeros elsewhere.
  void Unpack(void* table, DType type) const;
  // The numbers of the rows laid out, ascending.
  const std::vector<std::size_t>& present() const { return present_; }
  // Write the rows laid out, cast.
  void UnpackPresent(void* values, DType type) const { Cast(buffer_->data(), wire_, values, type, count()); }

 private:
  static constexpr std::uint16_t kFlag = 0x3c00;  // 1.0 in float16; an overflow of the sum is not zero either
  std::size_t RowBytes() const { return elements_ * SizeOf(wire_); }
  std::size_t Words() const { return (rows() + 15) / 16; }  // of the marks of a rank
  bool Marked(std::size_t rank, std::size_t row) const {
    return (marks_[rank * Words() + row / 16] >> row % 16 & 1) != 0;
  }
  // A buffer for this many rows that nobody else holds.
  void MakeRoom(std::size_t rows);
  void FindPresent();
  void LayOutPresent();
  char* Row(std::size_t place) const { return static_cast<char*>(buffer_->data()) + place * RowBytes(); }
  std::shared_ptr<AlignedBuffer> Grown(std::size_t rows) const;

  std::size_t elements_;
  DType wire_;
  bool from_gpu_;
  std::vector<std::uint16_t> flags_;
  std::vector<std::size_t> own_, present_;  // row numbers: of this rank, of any rank; ascending
  std::shared_ptr<AlignedBuffer> buffer_;
  std::vector<std::uint16_t> marks_;         // of each rank in turn
  std::size_t most_ = 0;                     // rows of a rank
  std::unique_ptr<AlignedBuffer> gathered_;  // `most_` rows for each rank in turn
};

}  // namespace hvpipe
