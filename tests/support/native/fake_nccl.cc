// An NCCL for tests without a GPU: sums host memory over MPI in the background, and fails on request.
// Collectives and messages wait their turn in the streams of fake_device.cc.
//
// Compile with -DVERSION=code. -DWITHOUT_BROADCAST and -DWITHOUT_MEMORY leave functions out. FAKE_NCCL
// chooses a failure:
//   "id", "init"      an error at once
//   "init-hang"       never ready
//   "async"           an error after the first collective
//   "collective"      an error of each collective
//   "hang"            the first collective never ends
//   "memory"          no memory
//   "memory-full"     no memory, and the test device has just run out of it as well
//   "memory-shared"   memory, of which another process takes much at the same moment
//   "finalize"        an error
// With FAKE_NCCL_ABORT=hang an abort takes a minute, as NCCL's may if other ranks of the host do not abort.
// Leaving waits for all ranks, as in NCCL. FAKE_NCCL_DEVICE names the library of the test device: calls are
// then refused on a thread that has no current device. Without it, or before it is loaded, calls run at once.
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/vector_loops.h"

#ifndef VERSION
#define VERSION 23005
#endif

namespace {

constexpr int kSuccess = 0, kUnhandledCudaError = 1, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

struct UniqueId {
  char internal[128];
};

struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

bool Fails(const char* how) {
  const char* const wanted = std::getenv("FAKE_NCCL");
  return wanted != nullptr && std::string(wanted) == how;
}

// Two ranks connect by messages and may make communicators in any order, as in NCCL. More ranks make a
// communicator all at the same time. The caller may use it if CommGetAsyncError returns success.
struct Communicator {
  int rank = 0, size = 1;
  MPI_Comm ranks = MPI_COMM_NULL;
  int serial = 0;  // number of its id, among the ids of the rank that created it
  int other = -1;  // the other one of two ranks, in MPI's world; negative: unknown so far
  int told = -1;   // what a rank tells about itself
  // Of a handshake, or of a call that runs at once.
  bool busy = false;
  std::shared_ptr<struct Call> call;
  MPI_Request request = MPI_REQUEST_NULL;
  bool launching = false;  // a call was handed to a stream, and CommGetAsyncError was not asked since
  int waiting = 0;         // calls that wait in streams
  bool aborted = false;
  bool of_buckets = false;  // it has scattered
  int state = kSuccess;
};

// One collective or message.
struct Call {
  Communicator* of;
  std::function<void(MPI_Request&)> begin;
  std::function<void()> end;
  bool begun = false;
  MPI_Request request = MPI_REQUEST_NULL;

  // Returns whether it is over.
  bool Run() {
    if (of->aborted) return true;
    if (!std::exchange(begun, true)) begin(request);
    int done = 1;
    if (request != MPI_REQUEST_NULL) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0 || Fails("hang")) return false;
    end();
    return true;
  }
};

Communicator& Of(void* communicator) { return *static_cast<Communicator*>(communicator); }

hvpipe::DType TypeOf(int type) {
  if (type == 6) return hvpipe::DType::kFloat16;
  if (type == 8) return hvpipe::DType::kFloat64;
  return type == 9 ? hvpipe::DType::kBFloat16 : hvpipe::DType::kFloat32;
}

std::atomic<bool> carrying{false};  // a message of this rank, or a sum of a group

std::atomic<int> memory_held{0}, registrations{0};
std::string calls;  // of the driving thread

struct Message {
  void* data;
  std::size_t bytes;
};

// State of the group that this thread has begun.
thread_local int groups = 0;
thread_local std::vector<Message> sends, receives;

// A function of the test device; null without one.
template <typename Function>
Function OfDevice(const char* name) {
  const char* const named = std::getenv("FAKE_NCCL_DEVICE");
  void* const device = named == nullptr ? nullptr : dlopen(named, RTLD_NOW | RTLD_NOLOAD);
  return device == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(device, name));
}

bool DeviceIsCurrent() {
  if (std::getenv("FAKE_NCCL_DEVICE") == nullptr) return true;
  const auto current = OfDevice<int (*)()>("current_device");
  return current != nullptr && current() >= 0;
}

[[noreturn]] void End(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::abort();
}

// What ncclMemAlloc returns is filled with this.
constexpr std::uint32_t kNotWritten = 0xa7c35e91;

void CheckIsWritten(const void* memory, std::size_t bytes) {
  for (std::size_t at = 0; at + sizeof kNotWritten <= bytes; at += sizeof kNotWritten) {
    if (std::memcmp(static_cast<const char*>(memory) + at, &kNotWritten, sizeof kNotWritten) == 0) {
      End("NCCL was given memory that nobody has written");
    }
  }
}

// Tags in MPI's world: a message of two ranks, then their handshakes when they connect and leave.
constexpr int kTags = 20'000;
int TagOf(const Communicator& of, int kind) { return kTags + 3 * (of.serial % 1000) + kind; }

MPI_Comm Connect(const Communicator& of, const std::vector<int>& members) {
  MPI_Comm made = MPI_COMM_NULL;
  MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, of.size, members.data(), &group);
  MPI_Comm_create_group(MPI_COMM_WORLD, group, TagOf(of, 1), &made);
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return made;
}

// The ranks in MPI's world of a communicator. Its first rank, `first` in the world, hears them from the
// others.
std::vector<int> MembersOf(const Communicator& of, int first) {
  std::vector<int> members(static_cast<std::size_t>(of.size));
  int told[2] = {of.rank, 0};
  MPI_Comm_rank(MPI_COMM_WORLD, &told[1]);
  if (of.rank > 0) {
    MPI_Send(told, 2, MPI_INT, first, TagOf(of, 2), MPI_COMM_WORLD);
    MPI_Recv(members.data(), of.size, MPI_INT, first, TagOf(of, 2), MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return members;
  }
  members[0] = first;
  for (int i = 1; i < of.size; ++i) {
    MPI_Recv(told, 2, MPI_INT, MPI_ANY_SOURCE, TagOf(of, 2), MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    members[static_cast<std::size_t>(told[0])] = told[1];
  }
  for (int i = 1; i < of.size; ++i) {
    MPI_Send(members.data(), of.size, MPI_INT, members[static_cast<std::size_t>(i)], TagOf(of, 2),
             MPI_COMM_WORLD);
  }
  return members;
}

// Two ranks make it with their first collective.
MPI_Comm Ranks(Communicator& of) {
  if (of.ranks != MPI_COMM_NULL) return of.ranks;
  int self = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &self);
  return of.ranks =
             Connect(of, of.rank == 0 ? std::vector<int>{self, of.other} : std::vector<int>{of.other, self});
}

std::atomic<int> collectives{0}, communicators{0};  // made so far

// Hands a call that uses this memory to a stream, or runs it at once.
int Launch(std::shared_ptr<Call> call, void* stream, const void* memory, std::size_t bytes) {
  Communicator& of = *call->of;
  if (Fails("async")) of.state = kRemoteError;
  using Enqueue = void (*)(void*, int (*)(void*), void*, const void*, std::size_t);
  const auto enqueue = OfDevice<Enqueue>("fake_device_enqueue");
  if (enqueue == nullptr) {
    of.call = std::move(call);
    of.busy = true;
    return kInProgress;
  }
  of.launching = true;
  ++of.waiting;
  const auto run = [](void* context) {
    const auto held = static_cast<std::shared_ptr<Call>*>(context);
    if (!(*held)->Run()) return 0;
    --(*held)->of->waiting;
    delete held;
    return 1;
  };
  enqueue(stream, run, new std::shared_ptr<Call>(std::move(call)), memory, bytes);
  return kInProgress;
}

bool Refuses(const Communicator& of) { return of.busy || of.launching || !DeviceIsCurrent(); }

// Gathers `count` elements of each rank; `end` gets them in the order of ranks.
int Gather(Communicator& of, const void* in, std::size_t count, hvpipe::DType dtype, void* stream,
           const void* memory, std::size_t memory_bytes,
           std::function<void(const char* gathered, std::size_t bytes)> end) {
  if (Refuses(of)) return kInvalidUsage;  // the caller did not wait until the communicator was ready
  const std::size_t bytes = count * hvpipe::SizeOf(dtype);
  const MPI_Comm ranks = of.size == 1 ? MPI_COMM_NULL : Ranks(of);
  ++collectives;
  if (Fails("collective")) return kUnhandledCudaError;
  struct Data {
    std::vector<char> sent, gathered;
  };
  const auto data = std::make_shared<Data>();
  const auto begin = [=, size = static_cast<std::size_t>(of.size)](MPI_Request& request) {
    CheckIsWritten(in, bytes);
    data->sent.assign(static_cast<const char*>(in), static_cast<const char*>(in) + bytes);
    data->gathered = data->sent;
    if (size == 1) return;
    data->gathered.resize(bytes * size);
    MPI_Iallgather(data->sent.data(), static_cast<int>(bytes), MPI_BYTE, data->gathered.data(),
                   static_cast<int>(bytes), MPI_BYTE, ranks, &request);
  };
  auto call = std::make_shared<Call>();
  call->of = &of;
  call->begin = begin;
  call->end = [=] { end(data->gathered.data(), bytes); };
  return Launch(std::move(call), stream, memory, memory_bytes);
}

// Writes the sums of `count` elements from `first` on.
auto SumOf(const Communicator& of, void* out, std::size_t first, std::size_t count, hvpipe::DType dtype) {
  return [=, size = static_cast<std::size_t>(of.size)](const char* gathered, std::size_t bytes) {
    std::vector<const void*> terms;
    for (std::size_t rank = 0; rank < size; ++rank) {
      terms.push_back(gathered + rank * bytes + first * hvpipe::SizeOf(dtype));
    }
    hvpipe::SumInto(out, terms.data(), terms.size(), dtype, count);
  };
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = VERSION;
  return kSuccess;
}

const char* ncclGetErrorString(int code) {
  return code == kUnhandledCudaError ? "unhandled cuda error"
                                     : (code == kRemoteError ? "remote process exited" : "invalid usage");
}

const char* ncclGetLastError(void*) { return "the last error of the test library"; }

int ncclGetUniqueId(UniqueId* id) {
  if (!DeviceIsCurrent()) return kInvalidUsage;
  if (Fails("id")) return kUnhandledCudaError;
  std::memset(id, 7, sizeof *id);
  int running = 0, maker = 0;
  MPI_Initialized(&running);
  if (running != 0) MPI_Comm_rank(MPI_COMM_WORLD, &maker);
  id->internal[1] = static_cast<char>(maker);
  static int serial = 0;
  std::memcpy(&id->internal[8], &++serial, sizeof serial);
  return kSuccess;
}

int ncclGroupStart();
int ncclGroupEnd();

int ncclCommInitRankConfig(void** out, int size, UniqueId id, int rank, Config* config) {
  if (!DeviceIsCurrent()) return kInvalidUsage;
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->size != 24) return kInvalidUsage;
  if (id.internal[0] != 7 || id.internal[127] != 7)
    return kInvalidUsage;  // the id was not passed on completely
  // By name, as NCCL calls some of its own functions.
  if (ncclGroupStart() != kSuccess || ncclGroupEnd() != kSuccess) return kInvalidUsage;
  std::free(realpath("/", nullptr));  // as NCCL does: memory that the C library allocated
  auto* const made = new Communicator;
  made->rank = rank;
  made->size = size;
  std::memcpy(&made->serial, &id.internal[8], sizeof made->serial);
  made->serial = 10 * made->serial + id.internal[1];
  if (size > 2) made->ranks = Connect(*made, MembersOf(*made, id.internal[1]));  // also if this rank fails
  if (Fails("init")) {
    delete made;
    return kUnhandledCudaError;
  }
  if (size == 2 && rank == 0) {
    MPI_Irecv(&made->other, 1, MPI_INT, MPI_ANY_SOURCE, TagOf(*made, 2), MPI_COMM_WORLD, &made->request);
    made->busy = true;
  } else if (size == 2) {
    made->other = id.internal[1];
    MPI_Comm_rank(MPI_COMM_WORLD, &made->told);
    MPI_Isend(&made->told, 1, MPI_INT, made->other, TagOf(*made, 2), MPI_COMM_WORLD, &made->request);
    made->busy = true;
  }
  ++communicators;
  *out = made;
  return kInProgress;
}

int ncclCommGetAsyncError(void* communicator, int* state) {
  Communicator& of = Of(communicator);
  *state = of.state;
  if (of.state != kSuccess) return kSuccess;
  if (Fails("init-hang") || (Fails("hang") && of.launching)) {
    *state = kInProgress;
    return kSuccess;
  }
  if (std::exchange(of.launching, false)) *state = kInProgress;
  if (!of.busy) return kSuccess;
  int done = 1;
  if (of.call) {
    done = of.call->Run() ? 1 : 0;
  } else {
    MPI_Test(&of.request, &done, MPI_STATUS_IGNORE);
  }
  if (done == 0) {
    *state = kInProgress;
    return kSuccess;
  }
  of.busy = false;
  of.call.reset();
  return kSuccess;
}

int ncclAllReduce(const void* in, void* out, std::size_t count, int type, int /*sum*/, void* communicator,
                  void* stream) {
  Communicator& of = Of(communicator);
  const hvpipe::DType dtype = TypeOf(type);
  auto sum = SumOf(of, out, 0, count, dtype);
  if (of.of_buckets)
    return Gather(of, in, count, dtype, stream, out, count * hvpipe::SizeOf(dtype), std::move(sum));
  if (carrying.exchange(true)) return kInvalidUsage;
  return Gather(of, in, count, dtype, stream, out, count * hvpipe::SizeOf(dtype),
                [sum = std::move(sum)](const char* gathered, std::size_t bytes) {
                  sum(gathered, bytes);
                  carrying = false;
                });
}

// Since it was last asked: each scatter and gather, with the elements of a rank's share.
const char* fake_nccl_calls() {
  static std::string given;
  given = std::exchange(calls, "");
  return given.c_str();
}

int ncclReduceScatter(const void* in, void* out, std::size_t part, int type, int /*sum*/, void* communicator,
                      void* stream) {
  calls += "scatter:" + std::to_string(part) + " ";
  Communicator& of = Of(communicator);
  of.of_buckets = true;
  const hvpipe::DType dtype = TypeOf(type);
  const std::size_t count = part * static_cast<std::size_t>(of.size);
  const std::size_t first = part * static_cast<std::size_t>(of.rank);
  return Gather(of, in, count, dtype, stream, in, count * hvpipe::SizeOf(dtype),
                SumOf(of, out, first, part, dtype));
}

int ncclAllGather(const void* in, void* out, std::size_t part, int type, void* communicator, void* stream) {
  calls += "gather:" + std::to_string(part) + " ";
  Communicator& of = Of(communicator);
  const hvpipe::DType dtype = TypeOf(type);
  const auto end = [=](const char* gathered, std::size_t bytes) {
    std::memcpy(out, gathered, bytes * static_cast<std::size_t>(of.size));
  };
  const std::size_t bytes = part * static_cast<std::size_t>(of.size) * hvpipe::SizeOf(dtype);
  return Gather(of, in, part, dtype, stream, out, bytes, end);
}

#ifndef WITHOUT_BROADCAST
int ncclBroadcast(const void* in, void* out, std::size_t bytes, int /*type*/, int root, void* communicator,
                  void* stream) {
  Communicator& of = Of(communicator);
  if (Refuses(of) || of.size == 1) return kInvalidUsage;
  ++collectives;
  auto call = std::make_shared<Call>();
  call->of = &of;
  call->begin = [=, ranks = Ranks(of)](MPI_Request& request) {
    if (in != out) std::memcpy(out, in, bytes);
    MPI_Ibcast(out, static_cast<int>(bytes), MPI_BYTE, root, ranks, &request);
  };
  call->end = [] {};
  return Launch(std::move(call), stream, out, bytes);
}
#endif

#ifndef WITHOUT_MEMORY
int ncclMemAlloc(void** memory, std::size_t bytes) {
  if (Fails("memory-full")) setenv("FAKE_DEVICE_FREE", "3000000", 1);  // others took the memory
  if (Fails("memory-full") || Fails("memory") || !DeviceIsCurrent()) return kUnhandledCudaError;
  if (Fails("memory-shared")) setenv("FAKE_DEVICE_FREE", "100000000", 1);  // another process took 900 MB
  *memory = std::malloc(bytes);
  std::fill_n(static_cast<std::uint32_t*>(*memory), bytes / sizeof kNotWritten, kNotWritten);
  ++memory_held;
  return kSuccess;
}

// Unlike CUDA's, it does not wait for the device.
int ncclMemFree(void* memory) {
  if (!DeviceIsCurrent()) return kInvalidUsage;  // memory_held will not return to 0
  const auto uses = OfDevice<int (*)(const void*, std::size_t)>("fake_device_uses");
  if (uses != nullptr && uses(memory, 1) != 0)
    End("memory of NCCL was freed that work on a stream waits to use");
  if (Fails("memory-shared")) unsetenv("FAKE_DEVICE_FREE");
  std::free(memory);
  --memory_held;
  return kSuccess;
}

int ncclCommRegister(void* communicator, void* memory, std::size_t, void** registration) {
  if (Refuses(Of(communicator))) return kInvalidUsage;
  *registration = memory;
  ++registrations;
  return kSuccess;
}

int ncclCommDeregister(void* communicator, void* registration) {
  if (Refuses(Of(communicator)) || registration == nullptr) return kInvalidUsage;
  --registrations;
  return kSuccess;
}
#endif

int nccl_collectives() { return collectives; }
int nccl_communicators() { return communicators; }
int nccl_memory_held() { return memory_held; }
int nccl_registrations() { return registrations; }

// Messages to this rank itself, inside a group and in order; or to the other one of two ranks, outside of
// groups. The second kind, and all-reduces of communicators that do not scatter, are one at a time on this
// rank: NCCL could wait for ever if streams do not make progress concurrently.
int Carry(Communicator& of, void* data, std::size_t bytes, int peer, bool sends, void* stream) {
  if (Refuses(of) || of.size != 2 || peer != 1 - of.rank) return kInvalidUsage;
  if (carrying.exchange(true)) return kInvalidUsage;
  const auto count = static_cast<int>(bytes);
  const auto sent = std::make_shared<std::vector<char>>();
  auto call = std::make_shared<Call>();
  call->of = &of;
  call->begin = [=, &of](MPI_Request& request) {
    if (sends) {
      sent->assign(static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
      MPI_Isend(sent->data(), count, MPI_BYTE, of.other, TagOf(of, 0), MPI_COMM_WORLD, &request);
    } else {
      MPI_Irecv(data, count, MPI_BYTE, of.other, TagOf(of, 0), MPI_COMM_WORLD, &request);
    }
  };
  call->end = [] { carrying = false; };
  return Launch(std::move(call), stream, data, bytes);
}

int ncclGroupStart() {
  ++groups;
  return kSuccess;
}

int ncclSend(const void* data, std::size_t bytes, int, int peer, void* communicator, void* stream) {
  if (groups == 0) return Carry(Of(communicator), const_cast<void*>(data), bytes, peer, true, stream);
  if (peer != Of(communicator).rank) return kInvalidUsage;
  sends.push_back({const_cast<void*>(data), bytes});
  return kInProgress;
}

int ncclRecv(void* data, std::size_t bytes, int, int peer, void* communicator, void* stream) {
  if (groups == 0) return Carry(Of(communicator), data, bytes, peer, false, stream);
  if (peer != Of(communicator).rank) return kInvalidUsage;
  receives.push_back({data, bytes});
  return kInProgress;
}

int ncclGroupEnd() {
  if (groups == 0) return kInvalidUsage;
  if (--groups > 0) return kSuccess;
  const std::vector<Message> sent = std::exchange(sends, {}), wanted = std::exchange(receives, {});
  if (sent.size() != wanted.size()) return kInvalidUsage;  // NCCL would wait for ever
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (sent[i].bytes != wanted[i].bytes) return kInvalidUsage;
    std::memcpy(wanted[i].data, sent[i].data, sent[i].bytes);
  }
  return kSuccess;
}

int ncclCommFinalize(void* communicator) {
  if (!DeviceIsCurrent()) return kInvalidUsage;
  Communicator& of = Of(communicator);
  if (Fails("finalize")) return kRemoteError;
  if (of.size == 1) return kSuccess;
  of.busy = true;
  if (of.size > 2) {
    MPI_Ibarrier(of.ranks, &of.request);
  } else {  // a handshake: only its arrival matters
    MPI_Request word = MPI_REQUEST_NULL;
    MPI_Isend(nullptr, 0, MPI_BYTE, of.other, TagOf(of, 1), MPI_COMM_WORLD, &word);
    MPI_Request_free(&word);
    MPI_Irecv(nullptr, 0, MPI_BYTE, of.other, TagOf(of, 1), MPI_COMM_WORLD, &of.request);
  }
  return kInProgress;
}

int ncclCommDestroy(void* communicator) {
  if (!DeviceIsCurrent()) return kInvalidUsage;
  if (Of(communicator).waiting > 0) End("a communicator was destroyed before its work");
  delete &Of(communicator);
  return kSuccess;
}

// Leaves requests under way, and their memory. Its streams go on. A rank that waits for the other one to
// connect stops to wait, so that it does not take the word of a later communicator.
int ncclCommAbort(void* communicator) {
  if (!DeviceIsCurrent()) End("ncclCommAbort without a current device");  // its callers ignore an error
  Communicator& of = Of(communicator);
  of.aborted = true;
  carrying = false;
  if (of.request != MPI_REQUEST_NULL && of.size == 2 && of.rank == 0) {
    MPI_Cancel(&of.request);
    MPI_Request_free(&of.request);
  }
  if (std::getenv("FAKE_NCCL_ABORT") != nullptr) std::this_thread::sleep_for(std::chrono::minutes(1));
  return kSuccess;
}
}
