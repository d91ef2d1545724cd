// An NCCL for tests without a GPU: sums host memory over MPI in the background, and fails on request. All
// ranks of MPI's world make communicators at the same time; ranks with the same id share one.
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
// Leaving waits for all ranks, as in NCCL. FAKE_NCCL_DEVICE names the library of the test device: collectives
// are then refused on a thread that has no current device.
#include <dlfcn.h>
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/vector_loops.h"

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

// One collective at a time. Its result is there when CommGetAsyncError returns success. Two ranks connect by
// messages and may make communicators in any order, as in NCCL. More ranks make a communicator all at the
// same time.
struct Communicator {
  int rank = 0, size = 1;
  MPI_Comm ranks = MPI_COMM_NULL;
  int serial = 0;  // number of its id, among the ids of the rank that created it
  int other = -1;  // the other one of two ranks, in MPI's world; negative: unknown so far
  int told = -1;   // what a rank tells about itself
  MPI_Request request = MPI_REQUEST_NULL;
  std::vector<char> sent, gathered;  // gathered: what every rank sent
  void* out = nullptr;
  bool sums = true;
  std::size_t first = 0, count = 0;  // the elements of each rank that are summed
  hvpipe::DType dtype = hvpipe::DType::kFloat32;
  bool busy = false;
  bool carries = false;  // a message or a handshake of two ranks
  bool sends_or_receives = false;
  bool leaving = false;
  int state = kSuccess;
};

Communicator& Of(void* communicator) { return *static_cast<Communicator*>(communicator); }

hvpipe::DType TypeOf(int type) {
  if (type == 6) return hvpipe::DType::kFloat16;
  if (type == 8) return hvpipe::DType::kFloat64;
  return type == 9 ? hvpipe::DType::kBFloat16 : hvpipe::DType::kFloat32;
}

std::atomic<bool> carrying{false};  // a message of this rank

void Finish(Communicator& communicator) {
  communicator.busy = false;
  if (std::exchange(communicator.sends_or_receives, false)) carrying = false;
  if (communicator.leaving || communicator.carries) return;
  if (!communicator.sums) {
    std::memcpy(communicator.out, communicator.gathered.data(), communicator.gathered.size());
    return;
  }
  std::vector<const void*> terms;
  for (int rank = 0; rank < communicator.size; ++rank) {
    terms.push_back(communicator.gathered.data() + static_cast<std::size_t>(rank) * communicator.sent.size() +
                    communicator.first * hvpipe::SizeOf(communicator.dtype));
  }
  hvpipe::SumInto(communicator.out, terms.data(), terms.size(), communicator.dtype, communicator.count);
}

std::atomic<int> memory_held{0}, registrations{0};

struct Message {
  void* data;
  std::size_t bytes;
};

// State of the group that this thread has begun.
thread_local int groups = 0;
thread_local std::vector<Message> sends, receives;

bool DeviceIsCurrent() {
  const char* const named = std::getenv("FAKE_NCCL_DEVICE");
  if (named == nullptr) return true;
  void* const device = dlopen(named, RTLD_NOW | RTLD_NOLOAD);
  const auto current =
      device == nullptr ? nullptr : reinterpret_cast<int (*)()>(dlsym(device, "current_device"));
  return current != nullptr && current() >= 0;
}

// Tags in MPI's world: a message of two ranks, then their handshakes when they connect and leave.
constexpr int kTags = 20'000;
int TagOf(const Communicator& of, int kind) { return kTags + 3 * (of.serial % 1000) + kind; }

// Two ranks make it with their first collective.
MPI_Comm Ranks(Communicator& of) {
  if (of.ranks != MPI_COMM_NULL) return of.ranks;
  int self = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &self);
  const int both[] = {of.rank == 0 ? self : of.other, of.rank == 0 ? of.other : self};
  MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, 2, both, &group);
  MPI_Comm_create_group(MPI_COMM_WORLD, group, TagOf(of, 1), &of.ranks);
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return of.ranks;
}

std::atomic<int> collectives{0};

// Begin to gather `count` elements of each rank.
int Begin(Communicator& of, const void* in, std::size_t count) {
  if (!DeviceIsCurrent()) return kInvalidUsage;
  const std::size_t bytes = count * hvpipe::SizeOf(of.dtype);
  of.sent.assign(static_cast<const char*>(in), static_cast<const char*>(in) + bytes);
  of.gathered = of.sent;
  ++collectives;
  if (Fails("collective")) return Ranks(of) != MPI_COMM_NULL ? kUnhandledCudaError : kInvalidUsage;
  of.busy = true;
  of.carries = false;
  if (Fails("async")) of.state = kRemoteError;
  if (of.size == 1) return kInProgress;
  of.gathered.resize(bytes * static_cast<std::size_t>(of.size));
  MPI_Iallgather(of.sent.data(), static_cast<int>(bytes), MPI_BYTE, of.gathered.data(),
                 static_cast<int>(bytes), MPI_BYTE, Ranks(of), &of.request);
  return kInProgress;
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
  MPI_Comm ranks = MPI_COMM_NULL;
  if (size > 2) MPI_Comm_split(MPI_COMM_WORLD, id.internal[1], rank, &ranks);
  if (Fails("init")) return kUnhandledCudaError;
  std::free(realpath("/", nullptr));  // as NCCL does: memory that the C library allocated
  auto* const made = new Communicator;
  made->rank = rank;
  made->size = size;
  std::memcpy(&made->serial, &id.internal[8], sizeof made->serial);
  made->serial = 10 * made->serial + id.internal[1];
  made->ranks = ranks;
  if (size == 2 && rank == 0) {
    MPI_Irecv(&made->other, 1, MPI_INT, MPI_ANY_SOURCE, TagOf(*made, 2), MPI_COMM_WORLD, &made->request);
    made->busy = made->carries = true;
  } else if (size == 2) {
    made->other = id.internal[1];
    MPI_Comm_rank(MPI_COMM_WORLD, &made->told);
    MPI_Isend(&made->told, 1, MPI_INT, made->other, TagOf(*made, 2), MPI_COMM_WORLD, &made->request);
    made->busy = made->carries = true;
  }
  *out = made;
  return kInProgress;
}

int ncclCommGetAsyncError(void* communicator, int* state) {
  Communicator& of = Of(communicator);
  *state = of.state;
  if (Fails("init-hang")) *state = kInProgress;
  if (!of.busy) return kSuccess;
  int done = 1;
  if (of.request != MPI_REQUEST_NULL) MPI_Test(&of.request, &done, MPI_STATUS_IGNORE);
  if (done != 0 && !Fails("hang")) Finish(of);
  if (of.busy) *state = kInProgress;
  return kSuccess;
}

int ncclAllReduce(const void* in, void* out, std::size_t count, int type, int /*sum*/, void* communicator,
                  void* /*stream*/) {
  Communicator& of = Of(communicator);
  if (of.busy) return kInvalidUsage;  // the caller did not wait until the communicator was ready
  of.dtype = TypeOf(type);
  of.sums = true;
  of.first = 0;
  of.count = count;
  of.out = out;
  return Begin(of, in, count);
}

int ncclReduceScatter(const void* in, void* out, std::size_t part, int type, int /*sum*/, void* communicator,
                      void* /*stream*/) {
  Communicator& of = Of(communicator);
  if (of.busy) return kInvalidUsage;
  of.dtype = TypeOf(type);
  of.sums = true;
  of.first = part * static_cast<std::size_t>(of.rank);
  of.count = part;
  of.out = out;
  return Begin(of, in, part * static_cast<std::size_t>(of.size));
}

int ncclAllGather(const void* in, void* out, std::size_t part, int type, void* communicator,
                  void* /*stream*/) {
  Communicator& of = Of(communicator);
  if (of.busy) return kInvalidUsage;
  of.dtype = TypeOf(type);
  of.sums = false;
  of.out = out;
  return Begin(of, in, part);
}

#ifndef WITHOUT_BROADCAST
int ncclBroadcast(const void* in, void* out, std::size_t bytes, int /*type*/, int root, void* communicator,
                  void* /*stream*/) {
  Communicator& of = Of(communicator);
  if (of.busy || of.size == 1 || !DeviceIsCurrent()) return kInvalidUsage;
  if (in != out) std::memcpy(out, in, bytes);
  ++collectives;
  MPI_Bcast(out, static_cast<int>(bytes), MPI_BYTE, root, Ranks(of));
  return kSuccess;
}
#endif

#ifndef WITHOUT_MEMORY
int ncclMemAlloc(void** memory, std::size_t bytes) {
  if (Fails("memory-full")) setenv("FAKE_DEVICE_FREE", "3000000", 1);  // others took the memory
  if (Fails("memory-full") || Fails("memory") || !DeviceIsCurrent()) return kUnhandledCudaError;
  if (Fails("memory-shared")) setenv("FAKE_DEVICE_FREE", "100000000", 1);  // another process took 900 MB
  *memory = std::malloc(bytes);
  std::memset(*memory, 0x55, bytes);
  ++memory_held;
  return kSuccess;
}

int ncclMemFree(void* memory) {
  if (!DeviceIsCurrent()) return kInvalidUsage;  // memory_held will not return to 0
  if (Fails("memory-shared")) unsetenv("FAKE_DEVICE_FREE");
  std::free(memory);
  --memory_held;
  return kSuccess;
}

int ncclCommRegister(void* communicator, void* memory, std::size_t, void** registration) {
  if (Of(communicator).busy || !DeviceIsCurrent()) return kInvalidUsage;
  *registration = memory;
  ++registrations;
  return kSuccess;
}

int ncclCommDeregister(void* communicator, void* registration) {
  if (Of(communicator).busy || registration == nullptr || !DeviceIsCurrent()) return kInvalidUsage;
  --registrations;
  return kSuccess;
}
#endif

int nccl_collectives() { return collectives; }
int nccl_memory_held() { return memory_held; }
int nccl_registrations() { return registrations; }

// Messages to this rank itself, inside a group and in order; or to the other one of two ranks, outside of
// groups. The second kind is one at a time on this rank: NCCL could wait for ever if streams do not make
// progress concurrently.
int Carry(Communicator& of, void* data, std::size_t bytes, int peer, bool sends) {
  if (of.busy || of.size != 2 || peer != 1 - of.rank || !DeviceIsCurrent()) return kInvalidUsage;
  if (carrying.exchange(true)) return kInvalidUsage;
  of.sends_or_receives = true;
  of.busy = of.carries = true;
  if (Fails("async")) of.state = kRemoteError;
  const auto count = static_cast<int>(bytes);
  if (sends) {
    of.sent.assign(static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
    MPI_Isend(of.sent.data(), count, MPI_BYTE, of.other, TagOf(of, 0), MPI_COMM_WORLD, &of.request);
  } else {
    MPI_Irecv(data, count, MPI_BYTE, of.other, TagOf(of, 0), MPI_COMM_WORLD, &of.request);
  }
  return kInProgress;
}

int ncclGroupStart() {
  ++groups;
  return kSuccess;
}

int ncclSend(const void* data, std::size_t bytes, int, int peer, void* communicator, void*) {
  if (groups == 0) return Carry(Of(communicator), const_cast<void*>(data), bytes, peer, true);
  if (peer != Of(communicator).rank) return kInvalidUsage;
  sends.push_back({const_cast<void*>(data), bytes});
  return kInProgress;
}

int ncclRecv(void* data, std::size_t bytes, int, int peer, void* communicator, void*) {
  if (groups == 0) return Carry(Of(communicator), data, bytes, peer, false);
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
  of.busy = of.leaving = true;
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
  delete &Of(communicator);
  return kSuccess;
}

// Leaves requests under way, and their memory. A rank that waits for the other one to connect stops to wait, so that
// it does not take the word of a later communicator.
int ncclCommAbort(void* communicator) {
  if (!DeviceIsCurrent()) {  // its callers ignore an error
    std::fputs("ncclCommAbort without a current device\n", stderr);
    std::abort();
  }
  Communicator& of = Of(communicator);
  if (of.sends_or_receives) carrying = false;
  if (of.request != MPI_REQUEST_NULL && of.size == 2 && of.rank == 0 && of.ranks == MPI_COMM_NULL && !of.sends_or_receives) {
    MPI_Cancel(&of.request);
    MPI_Request_free(&of.request);
  }
  if (std::getenv("FAKE_NCCL_ABORT") != nullptr) std::this_thread::sleep_for(std::chrono::minutes(1));
  return kSuccess;
}
}
