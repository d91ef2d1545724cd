// Fills the tables of tensors that the device's kernels take.
#pragma once

#include <cstddef>
#include <vector>

#include "base/error.h"
#include "gpu/cast_tile.h"
#include "gpu/device.h"

namespace hvpipe {

// Call launch(table, tiles) for all pieces, with as many pieces per call as a table holds.
template <typename Launch>
void ForEachTable(const std::vector<Device::Piece>& pieces, double scale, const Launch& launch) {
  TileTable table{};
  table.scale = scale;
  unsigned tiles = 0;
  const auto flush = [&] {
    if (tiles > 0) launch(table, tiles);
    tiles = 0;
    table.pieces = 0;
  };
  for (const Device::Piece& piece : pieces) {
    if (piece.count == 0) continue;
    const std::size_t needed = (piece.count + kTileElements - 1) / kTileElements;
    if (needed > 0x7fffffffu) throw Error("internal: a tensor needs more blocks than one launch allows");
    if (table.pieces == TileTable::kCapacity || tiles + needed > 0x7fffffffu) flush();
    table.entries[table.pieces++] = {piece.from, piece.to, piece.count, tiles};
    tiles += static_cast<unsigned>(needed);
  }
  flush();
}

}  // namespace hvpipe
