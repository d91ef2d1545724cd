// NCCL, found when it is first wanted: the functions that are used of it, and a communicator whose waits end.
#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <string>

#include "core/bucket.h"
#include "core/error.h"

namespace hvpipe {

// What is used of nccl.h, so that hvpipe builds where there is none. NCCL keeps this binary interface within
// major version 2; tests/test_nccl.py holds it against a real header.
namespace nccl {

constexpr int kSuccess = 0;
constexpr int kInProgress = 7;
constexpr int kSum = 0;
constexpr int kInt8 = 0;
constexpr int kMajor = 2;
constexpr int kOldest = 21900;  // 2.19: an abort ends where several threads use NCCL, before it may not

struct UniqueId {
  char internal[128];
};

// ncclConfig_t as of 2.14. Newer versions take what lies beyond `size` from their own defaults.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

using Communicator = void*;
using Stream = void*;

// Name without "nccl", then its parameters; each returns a result code.
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

// Of 2.19 and later: used where all of them are there.
#define HVPIPE_NCCL_MEMORY_FUNCTIONS(X)              \
  X(MemAlloc, void**, std::size_t)                   \
  X(MemFree, void*)                                  \
  X(CommRegister, void*, void*, std::size_t, void**) \
  X(CommDeregister, void*, void*)

int TypeOf(DType dtype);

}  // namespace nccl

// The functions of one libnccl.so, which stays loaded: NCCL's own threads may outlive its users.
class NcclLibrary {
 public:
  // `path` as dlopen takes it. Throws where it cannot be loaded, lacks a function, or is of a version that
  // hvpipe does not know.
  explicit NcclLibrary(const std::string& path);

  const std::string& path() const { return path_; }
  int version() const { return version_; }
  // "2.27.3"
  std::string VersionText() const;
  nccl::UniqueId NewId() const;
  bool has_memory() const { return MemAlloc && MemFree && CommRegister && CommDeregister; }
  // Memory of the current device that NCCL can register, where it has memory. Not cleared.
  void* Allocate(std::size_t bytes) const;
  void Free(void* memory) const noexcept { (void)MemFree(memory); }
  // Throws with NCCL's words, unless `code` says success or that it goes on in the background.
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

// One rank's end of an NCCL communicator on the device that is current where it is made. Calls only enqueue,
// and nothing waits for a peer: after each call, ask `Ready` until it is true before the next call and before
// an event is recorded behind it. All ranks make the same calls in the same order. Whoever enqueues work
// holds the device current.
class NcclCommunicator {
 public:
  NcclCommunicator(const NcclLibrary& library, int rank, int size, const nccl::UniqueId& id);
  // Aborts, unless it was closed; does not wait for that.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int size() const { return size_; }
  // Whether NCCL has nothing left to do in the background. Throws, after an abort, on an asynchronous error.
  bool Ready();
  // Asks until it is ready; throws, after an abort, when `timeout_s` is over. `interrupt` may throw.
  void WaitUntilReady(double timeout_s, const std::string& what, const std::function<void()>& interrupt);

  // out = sum of in over the ranks; in may be out. `count` elements.
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, nccl::Stream stream);
  // The sum as a reduce-scatter and an all-gather, in place; `count` is a multiple of the number of ranks.
  void ReduceScatter(void* buffer, std::size_t count, DType dtype, nccl::Stream stream);
  void AllGather(void* buffer, std::size_t count, DType dtype, nccl::Stream stream);
  void Broadcast(void* data, std::size_t bytes, int root, nccl::Stream stream);
  void Send(const void* data, std::size_t bytes, int peer, nccl::Stream stream);
  void Receive(void* data, std::size_t bytes, int peer, nccl::Stream stream);
  // What `calls` enqueues starts as one launch, and sends and receives inside cannot wait for each other. The
  // engine has no use for it: each of its collectives is one call, and each way between two ranks has a
  // communicator of its own.
  void Grouped(const std::function<void()>& calls);
  // Lets other GPUs and the network card read and write this memory of NcclLibrary::Allocate themselves,
  // until Deregister or the end of the communicator. What one rank gives to a collective must be registered
  // on all ranks or on none. Returns what Deregister wants; null where the user told NCCL not to.
  void* Register(void* memory, std::size_t bytes);
  void Deregister(void* registration);

  // Ends what is under way, on the device as well; nothing can be called after. Idempotent. NCCL does that on
  // a thread of its own, since it may wait there for the other ranks of this host to abort as well.
  void Abort() noexcept;
  // Whether NCCL is done with an abort, if there was one, within `patience_s`.
  bool Aborted(double patience_s) const;
  // Leaves in an orderly way, where nothing is under way; waits for NCCL at most `timeout_s`. Aborts where it
  // throws. Whoever leaves several begins with all of them first: another rank may leave them in another
  // order.
  void BeginClose();
  void Close(double timeout_s);

 private:
  nccl::Communicator Usable() const;
  char* PartOfRank(void* buffer, std::size_t count, DType dtype) const;

  const NcclLibrary& library_;
  const int rank_, size_;
  nccl::Communicator communicator_ = nullptr;
  bool closing_ = false;
  std::future<void> aborted_;
};

}  // namespace hvpipe
