// NCCL, loaded at run time: the functions that hvpipe uses, and a communicator whose waits have limits.
#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "gpu/device.h"

namespace hvpipe {

// The parts of nccl.h that hvpipe uses, so that it builds without NCCL. NCCL keeps this binary interface
// within major version 2. tests/csrc/gpu/test_nccl.py checks it against a real header.
namespace nccl {

constexpr int kSuccess = 0;
constexpr int kInProgress = 7;
constexpr int kSum = 0;
constexpr int kInt8 = 0;
constexpr int kMajor = 2;
constexpr int kOldest = 21900;  // 2.19: before it, an abort may hang if several threads use NCCL
// 2.27: before it, what a non-blocking call leaves behind on its thread is used by calls on other
// communicators, which then crash.
constexpr int kOldestWithSeveral = 22700;

struct UniqueId {
  char internal[128];
};

// ncclConfig_t as of 2.14. Newer versions use defaults for fields beyond `size`.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

using Communicator = void*;
using Stream = void*;

// Name without "nccl", then the parameter types. Each function returns a result code.
#define HVPIPE_NCCL_FUNCTIONS(X)                                                             \
  X(GetVersion, int*)                                                                        \
  X(GetUniqueId, ::hvpipe::nccl::UniqueId*)                                                  \
  X(CommInitRankConfig, void**, int, ::hvpipe::nccl::UniqueId, int, ::hvpipe::nccl::Config*) \
  X(CommFinalize, void*)                                                                     \
  X(CommDestroy, void*)                                                                      \
  X(CommAbort, void*)                                                                        \
  X(CommGetAsyncError, void*, int*)                                                          \
  X(AllReduce, const void*, void*, std::size_t, int, int, void*, void*)                      \
  X(ReduceScatter, const void*, void*, std::size_t, int, int, void*, void*)                  \
  X(AllGather, const void*, void*, std::size_t, int, void*, void*)                           \
  X(Broadcast, const void*, void*, std::size_t, int, int, void*, void*)                      \
  X(Send, const void*, std::size_t, int, int, void*, void*)                                  \
  X(Recv, void*, std::size_t, int, int, void*, void*)                                        \
  X(GroupStart)                                                                              \
  X(GroupEnd)

// In 2.19 and later. Used only if all of them exist.
#define HVPIPE_NCCL_MEMORY_FUNCTIONS(X)              \
  X(MemAlloc, void**, std::size_t)                   \
  X(MemFree, void*)                                  \
  X(CommRegister, void*, void*, std::size_t, void**) \
  X(CommDeregister, void*, void*)

int TypeOf(DType dtype);

}  // namespace nccl

// The functions of one libnccl.so. The library stays loaded, because NCCL's own threads may outlive its
// users.
class NcclLibrary {
 public:
  // `path` as for dlopen. Throws if the library cannot be loaded, lacks a function, or has an unsupported
  // version.
  explicit NcclLibrary(const std::string& path);

  const std::string& path() const { return path_; }
  int version() const { return version_; }
  // "2.27.3"
  std::string VersionText() const;
  // The caller holds a device current.
  nccl::UniqueId NewId() const;
  bool has_memory() const { return MemAlloc && MemFree && CommRegister && CommDeregister; }
  // Memory of the current device that NCCL can register. Not cleared. Requires has_memory().
  void* Allocate(std::size_t bytes) const;
  void Free(void* memory) const noexcept { (void)MemFree(memory); }
  // Throw NCCL's error text, unless `code` is success or "in progress".
  void Check(int code, const char* call, nccl::Communicator communicator = nullptr) const;

#define HVPIPE_NCCL_POINTER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  HVPIPE_NCCL_FUNCTIONS(HVPIPE_NCCL_POINTER)
  HVPIPE_NCCL_MEMORY_FUNCTIONS(HVPIPE_NCCL_POINTER)
#undef HVPIPE_NCCL_POINTER

 private:
  std::string path_;
  int version_ = 0;
  const char* (*error_text_)(int) = nullptr;
  const char* (*last_error_)(nccl::Communicator) = nullptr;
};

// One rank's end of an NCCL communicator, on a device that each call makes current: without a current device
// NCCL makes a context on the first GPU of the host. Calls only enqueue; none waits for a peer (in NCCL 2.22
// to 2.25 the first call of a kind may). After each call, ask Ready until it is true before the next call,
// and before recording an event behind it. All ranks make the same calls in the same order.
//
// Threads: the driving thread (see Progress), except that any thread may call Abort.
class NcclCommunicator {
 public:
  // An abort may outlive the communicator, so it shares the device. No device: for tests without one.
  NcclCommunicator(const NcclLibrary& library, std::shared_ptr<Device> device, int rank, int size,
                   const nccl::UniqueId& id);
  // Aborts unless closed. Does not wait for the abort.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int size() const { return size_; }
  // Whether NCCL has finished its background work. Throws on an asynchronous error; then call Abort.
  bool Ready();
  // The same, but gives NCCL some microseconds: it hands most calls over in a thread of its own.
  bool ReadySoon();
  // Wait until ready. Aborts and throws after `timeout_s` seconds. `interrupt` may throw.
  void WaitUntilReady(double timeout_s, const std::string& what, const std::function<void()>& interrupt);
  // The same, and until `done`.
  void WaitUntil(const std::function<bool()>& done, double timeout_s, const std::string& what,
                 const std::function<void()>& interrupt);

  // out = sum of in over the ranks, `count` elements. in may be out.
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, nccl::Stream stream);
  // An all-reduce in two halves, in place. `count` must be a multiple of the number of ranks.
  void ReduceScatter(void* buffer, std::size_t count, DType dtype, nccl::Stream stream);
  void AllGather(void* buffer, std::size_t count, DType dtype, nccl::Stream stream);
  void Broadcast(void* data, std::size_t bytes, int root, nccl::Stream stream);
  void Send(const void* data, std::size_t bytes, int peer, nccl::Stream stream);
  void Receive(void* data, std::size_t bytes, int peer, nccl::Stream stream);
  // Launch everything that `calls` enqueues at once, so that sends and receives inside cannot wait for each
  // other. Only tests use it: each collective of the engine is one call, and each pair of ranks has a
  // communicator of its own.
  void Grouped(const std::function<void()>& calls);
  // Let other GPUs and the network card access this memory of NcclLibrary::Allocate directly, until
  // Deregister or the end of the communicator. The buffers of a collective must be registered on all ranks or
  // on none. Returns the registration for Deregister; null if the user has disabled registration in NCCL.
  void* Register(void* memory, std::size_t bytes);
  void Deregister(void* registration);

  // End everything under way, on the device as well. Later calls throw. Idempotent. The abort runs on a
  // thread of its own, because NCCL may wait there until the other ranks of this host abort as well.
  void Abort() noexcept;
  // Whether NCCL finishes an abort within `patience_s` seconds. True without an abort.
  bool Aborted(double patience_s) const;
  // Close the communicator with nothing under way. Waits for NCCL for at most `timeout_s` seconds in each of
  // two steps; aborts if it throws. To close several, call BeginClose on all of them first, because other
  // ranks may close them in another order.
  void BeginClose();
  void Close(double timeout_s);

 private:
  // Where this rank's share of a scattered buffer begins.
  char* ShareOfRank(void* buffer, std::size_t count, DType dtype) const;
  nccl::Communicator Usable() const;
  void EndOnThread(int (*end)(nccl::Communicator)) noexcept;

  const NcclLibrary& library_;
  const std::shared_ptr<Device> device_;
  const int rank_, size_;
  nccl::Communicator communicator_ = nullptr;
  bool closing_ = false;
  std::future<void> ended_;
};

}  // namespace hvpipe
