// The fused buffer of a bucket in device memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "core/bucket_layout.h"
#include "device/device.h"
#include "device/device_memory.h"
#include "device/rank_device.h"

namespace hvpipe {

// Device memory, plus host memory for what passes through the host: nothing if NCCL connects all ranks, the
// share of this rank if NCCL connects the ranks of a host, everything without NCCL.
//
// The sums can be lent out where they lie. If a holder still has them when the next step is packed, the
// buffer takes another block of memory. It keeps its blocks: a variable that holds a gradient from step to
// step makes it use two of them in turn.
//
// Threads: one at a time may enqueue work; Register and Deregister are for the driving thread; a loan may end
// on any thread.
class DeviceBuffer {
 public:
  DeviceBuffer(RankDevice& device, std::size_t count, DType dtype);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  RankDevice& rank_device() const { return device_; }
  // Elements: the count asked for, plus zeros that make the shares of all NCCL ranks equal and aligned.
  std::size_t count() const { return count_; }
  void* data() const { return block_->data.get(); }  // TakeBlock may change it
  void* host() const { return host_.get(); }
  // The address of tensor `index`.
  void* PlaceOf(const BucketLayout& layout, std::size_t index) const {
    return static_cast<char*>(data()) + layout.offsets[index] * SizeOf(layout.wire_type);
  }
  Device::Event filled() const { return filled_.get(); }  // recorded after the pack
  Device::Event moved() const { return moved_.get(); }    // recorded after the last step of the communication

  // Call before a step is packed: afterwards nobody holds the block, and `stream` waits until its sums were
  // read.
  void TakeBlock(Device::Stream stream);
  // Call when work that reads the sums was enqueued on `stream`.
  void NoteRead(Device::Stream stream);
  // Lend the sums to work that will be enqueued on `stream`. The pointer is their address. The loan ends with
  // its last copy. If the buffer has ended before, its memory stays allocated.
  std::shared_ptr<void> Lend(Device::Stream stream);
  // Whether the device has read all sums that are not lent out.
  bool Read() const;

  // Call before NCCL's first collective on the block, while NCCL is not busy.
  void Register();
  // Call before the buffer ends, if NCCL is used further.
  void Deregister();

 private:
  struct Block {
    OwnedHandle data;
    OwnedHandle read;       // an event
    bool was_read = false;  // the event was recorded; belongs to the loan while there is one
    bool registered = false;
    void* registration = nullptr;
    std::atomic<bool> left{false};  // the buffer has ended before the loan
  };
  std::shared_ptr<Block> MakeBlock() const;
  static bool IsLent(const std::shared_ptr<Block>& block);

  RankDevice& device_;
  const std::size_t count_, bytes_;
  const bool nccl_memory_;  // the same on all ranks
  std::vector<std::shared_ptr<Block>> blocks_;
  Block* block_;  // one of them
  OwnedHandle host_;
  OwnedHandle filled_, moved_;
};

}  // namespace hvpipe
