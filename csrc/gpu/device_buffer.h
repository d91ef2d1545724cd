// The fused buffer of a bucket in device memory.
#pragma once

#include <cstddef>

#include "collectives/bucket_layout.h"
#include "gpu/device.h"
#include "gpu/device_memory.h"
#include "gpu/rank_device.h"

namespace hvpipe {

// Device memory, plus as much host memory unless NCCL connects the ranks.
//
// Threads: Submit and Unpack enqueue work on the data; Register and Deregister are for the driving thread.
class DeviceBuffer {
 public:
  DeviceBuffer(RankDevice& device, std::size_t count, DType dtype);

  RankDevice& rank_device() const { return device_; }
  // Elements: the count asked for, plus zeros that make the shares of all NCCL ranks equal and aligned.
  std::size_t count() const { return count_; }
  void* data() const { return data_.get(); }
  void* host() const { return host_.get(); }
  // The address of tensor `index`.
  void* PlaceOf(const BucketLayout& layout, std::size_t index) const {
    return static_cast<char*>(data()) + layout.offsets[index] * SizeOf(layout.wire_type);
  }
  Device::Event filled() const { return filled_.get(); }  // recorded after the pack
  Device::Event moved() const { return moved_.get(); }    // recorded after the last step of the communication
  Device::Event read() const { return read_.get(); }      // recorded after the unpack

  // Call before NCCL's first collective on it, while NCCL is not busy.
  void Register();
  // Call before the buffer ends, if NCCL is used further.
  void Deregister();

 private:
  RankDevice& device_;
  const std::size_t count_, bytes_;
  const bool nccl_memory_;  // the same on all ranks
  bool registered_ = false;
  void* registration_ = nullptr;
  OwnedHandle data_, host_;
  OwnedHandle filled_, moved_, read_;
};

}  // namespace hvpipe
