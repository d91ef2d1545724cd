// Loads NCCL, checks its version, and turns its result codes into errors that name the call.
#include "gpu/nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/event_log.h"

namespace hvpipe {
namespace nccl {

int TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    default:
      throw Error("internal: NCCL gets no " + std::string(NameOf(dtype)));
  }
}

}  // namespace nccl

namespace {

constexpr auto kPause = std::chrono::microseconds(200);
#if defined(__SANITIZE_ADDRESS__)  // which ends a process that uses RTLD_DEEPBIND
constexpr int kOwnNamesFirst = 0;
#else
constexpr int kOwnNamesFirst = RTLD_DEEPBIND;
#endif
const char* const kHow =
    "Install one (pip install nvidia-nccl-cu12, or -cu13 for CUDA 13) or name one with HVPIPE_NCCL_LIBRARY";

// A device current on this thread for a scope; nothing without a device.
class Here {
 public:
  explicit Here(const std::shared_ptr<Device>& device) {
    if (device) current_.emplace(*device);
  }

 private:
  std::optional<CurrentDevice> current_;
};

std::string TextOf(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <typename Function>
void Find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return;
  throw Error("NCCL lacks the function " + std::string(name) + ". " + kHow + ". Received: " + path,
              ErrorKind::kUsage);
}

// TensorFlow's GPU wheel exports functions with the names of NCCL's. NCCL calls some of its own functions by
// name and must find its own ones: RTLD_LOCAL and RTLD_DEEPBIND ensure that. RTLD_DEEPBIND also hides a
// preloaded malloc, although NCCL receives and frees memory from it. So it is used only if such functions
// exist.
int OpenFlags() {
  const bool has_same_names = dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr;
  return RTLD_NOW | RTLD_LOCAL | (has_same_names ? kOwnNamesFirst : 0);
}

}  // namespace

NcclLibrary::NcclLibrary(const std::string& path) : path_(path) {
  void* const library = dlopen(path.c_str(), OpenFlags());
  if (library == nullptr) {
    const char* const why = dlerror();
    throw Error(std::string("NCCL does not load. ") + kHow + ". Received: " + (why != nullptr ? why : path),
                ErrorKind::kUsage);
  }
  // Check the version first, because an old library lacks functions.
  Find(library, path, "ncclGetVersion", GetVersion);
  Find(library, path, "ncclGetErrorString", error_text_);
  Check(GetVersion(&version_), "ncclGetVersion");
  // Before 2.9 a version was written 2804 for 2.8.4.
  if (version_ < nccl::kOldest || version_ / 10000 != nccl::kMajor) {
    throw Error("NCCL should be version 2.19 or a later 2. " + std::string(kHow) + ". Received: " + path +
                    " of version " + (version_ < 10000 ? "code " + std::to_string(version_) : VersionText()),
                ErrorKind::kUsage);
  }
  Find(library, path, "ncclGetLastError", last_error_);
#define HVPIPE_NCCL_FIND(name, ...) Find(library, path, "nccl" #name, name);
  HVPIPE_NCCL_FUNCTIONS(HVPIPE_NCCL_FIND)
#undef HVPIPE_NCCL_FIND
#define HVPIPE_NCCL_LOOK(name, ...) name = reinterpret_cast<decltype(name)>(dlsym(library, "nccl" #name));
  HVPIPE_NCCL_MEMORY_FUNCTIONS(HVPIPE_NCCL_LOOK)
#undef HVPIPE_NCCL_LOOK
}

std::string NcclLibrary::VersionText() const { return TextOf(version_); }

nccl::UniqueId NcclLibrary::NewId() const {
  nccl::UniqueId id;
  Check(GetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

void* NcclLibrary::Allocate(std::size_t bytes) const {
  void* memory = nullptr;
  Check(MemAlloc(&memory, bytes), "ncclMemAlloc");
  return memory;
}

void NcclLibrary::Check(int code, const char* call, nccl::Communicator communicator) const {
  if (code == nccl::kSuccess || code == nccl::kInProgress) return;
  std::string text = "NCCL call failed: " + std::string(call) + ": " + error_text_(code);
  const char* const last = last_error_ != nullptr ? last_error_(communicator) : nullptr;
  if (last != nullptr && last[0] != '\0') text += " (" + std::string(last) + ")";
  throw Error(text + ". NCCL_DEBUG=WARN makes NCCL say more.", ErrorKind::kPeer);
}

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, std::shared_ptr<Device> device, int rank,
                                   int size, const nccl::UniqueId& id)
    : library_(library), device_(std::move(device)), rank_(rank), size_(size) {
  const Here here(device_);
  nccl::Config config;
  try {
    library_.Check(library_.CommInitRankConfig(&communicator_, size, id, rank, &config),
                   "ncclCommInitRankConfig");
  } catch (const Error&) {
    Abort();  // the communicator may exist all the same, and no destructor will run
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { Abort(); }

nccl::Communicator NcclCommunicator::Usable() const {
  if (communicator_ != nullptr) return communicator_;
  throw Error("The NCCL communicator was ended by an earlier error.", ErrorKind::kPeer);
}

bool NcclCommunicator::Ready() {
  const Here here(device_);
  int state = nccl::kSuccess;
  library_.Check(library_.CommGetAsyncError(Usable(), &state), "ncclCommGetAsyncError", communicator_);
  library_.Check(state, "an asynchronous operation", communicator_);
  return state == nccl::kSuccess;
}

bool NcclCommunicator::ReadySoon() {
  constexpr double kPatienceS = 50e-6;
  const double end_s = Now() + kPatienceS;
  while (!Ready()) {
    if (Now() > end_s) return false;
  }
  return true;
}

void NcclCommunicator::WaitUntilReady(double timeout_s, const std::string& what,
                                      const std::function<void()>& interrupt) {
  WaitUntil([] { return true; }, timeout_s, what, interrupt);
}

void NcclCommunicator::WaitUntil(const std::function<bool()>& done, double timeout_s, const std::string& what,
                                 const std::function<void()>& interrupt) {
  const double end_s = Now() + timeout_s;
  const auto ready = [this] {
    try {
      return Ready();
    } catch (const Error&) {
      Abort();
      throw;
    }
  };
  while (!ready() || !done()) {
    if (Now() > end_s) {
      Abort();
      throw Error("Waited " + std::to_string(timeout_s) + " s for NCCL: " + what + ", rank " +
                      std::to_string(rank_) + " of " + std::to_string(size_) +
                      ". Has another rank ended, or can they not reach each other (NCCL_SOCKET_IFNAME)? "
                      "NCCL_DEBUG=INFO shows what NCCL tries.",
                  ErrorKind::kDeadline);
    }
    interrupt();
    std::this_thread::sleep_for(kPause);
  }
}

void NcclCommunicator::AllReduce(const void* in, void* out, std::size_t count, DType dtype,
                                 nccl::Stream stream) {
  const Here here(device_);
  library_.Check(library_.AllReduce(in, out, count, nccl::TypeOf(dtype), nccl::kSum, Usable(), stream),
                 "ncclAllReduce", communicator_);
}

char* NcclCommunicator::ShareOfRank(void* buffer, std::size_t count, DType dtype) const {
  const auto ranks = static_cast<std::size_t>(size_);
  if (count % ranks != 0) throw Error("internal: a scattered buffer is not a multiple of the ranks");
  return static_cast<char*>(buffer) + count / ranks * static_cast<std::size_t>(rank_) * SizeOf(dtype);
}

void NcclCommunicator::ReduceScatter(void* buffer, std::size_t count, DType dtype, nccl::Stream stream) {
  const Here here(device_);
  void* const mine = ShareOfRank(buffer, count, dtype);
  const std::size_t share = count / static_cast<std::size_t>(size_);
  library_.Check(
      library_.ReduceScatter(buffer, mine, share, nccl::TypeOf(dtype), nccl::kSum, Usable(), stream),
      "ncclReduceScatter", communicator_);
}

void NcclCommunicator::AllGather(void* buffer, std::size_t count, DType dtype, nccl::Stream stream) {
  const Here here(device_);
  const void* const mine = ShareOfRank(buffer, count, dtype);
  const std::size_t share = count / static_cast<std::size_t>(size_);
  library_.Check(library_.AllGather(mine, buffer, share, nccl::TypeOf(dtype), Usable(), stream),
                 "ncclAllGather", communicator_);
}

void NcclCommunicator::Broadcast(void* data, std::size_t bytes, int root, nccl::Stream stream) {
  const Here here(device_);
  library_.Check(library_.Broadcast(data, data, bytes, nccl::kInt8, root, Usable(), stream), "ncclBroadcast",
                 communicator_);
}

void NcclCommunicator::Send(const void* data, std::size_t bytes, int peer, nccl::Stream stream) {
  const Here here(device_);
  library_.Check(library_.Send(data, bytes, nccl::kInt8, peer, Usable(), stream), "ncclSend", communicator_);
}

void NcclCommunicator::Receive(void* data, std::size_t bytes, int peer, nccl::Stream stream) {
  const Here here(device_);
  library_.Check(library_.Recv(data, bytes, nccl::kInt8, peer, Usable(), stream), "ncclRecv", communicator_);
}

void* NcclCommunicator::Register(void* memory, std::size_t bytes) {
  const Here here(device_);
  void* registration = nullptr;
  library_.Check(library_.CommRegister(Usable(), memory, bytes, &registration), "ncclCommRegister",
                 communicator_);
  return registration;
}

void NcclCommunicator::Deregister(void* registration) {
  const Here here(device_);
  library_.Check(library_.CommDeregister(Usable(), registration), "ncclCommDeregister", communicator_);
}

void NcclCommunicator::Grouped(const std::function<void()>& calls) {
  const Here here(device_);
  library_.Check(library_.GroupStart(), "ncclGroupStart");
  try {
    calls();
  } catch (...) {
    (void)library_.GroupEnd();  // otherwise every later call would wait for the end of this group
    throw;
  }
  library_.Check(library_.GroupEnd(), "ncclGroupEnd", communicator_);
}

void NcclCommunicator::Abort() noexcept {
  if (communicator_ != nullptr) EndOnThread(library_.CommAbort);
}

// On a thread of its own, because NCCL may wait for other ranks of this host.
void NcclCommunicator::EndOnThread(int (*end)(nccl::Communicator)) noexcept {
  const nccl::Communicator ended = std::exchange(communicator_, nullptr);
  try {
    std::promise<void> over;
    ended_ = over.get_future();
    std::thread([end, ended, device = device_, over = std::move(over)]() mutable {
      {
        const Here here(device);
        (void)end(ended);
      }
      over.set_value();
    }).detach();
  } catch (const std::exception&) {  // no thread: the communicator ends with the process
  }
}

bool NcclCommunicator::Aborted(double patience_s) const {
  return !ended_.valid() ||
         ended_.wait_for(std::chrono::duration<double>(patience_s)) == std::future_status::ready;
}

void NcclCommunicator::BeginClose() {
  if (communicator_ == nullptr || std::exchange(closing_, true)) return;
  const Here here(device_);
  try {
    library_.Check(library_.CommFinalize(communicator_), "ncclCommFinalize", communicator_);
  } catch (const Error&) {
    Abort();
    throw;
  }
}

void NcclCommunicator::Close(double timeout_s) {
  BeginClose();
  if (communicator_ == nullptr) return;
  try {
    WaitUntilReady(timeout_s, "leaving the communicator", [] {});
  } catch (const Error&) {
    Abort();
    throw;
  }
  EndOnThread(library_.CommDestroy);
  if (!Aborted(timeout_s)) {
    throw Error("Waited " + std::to_string(timeout_s) + " s for NCCL: ncclCommDestroy", ErrorKind::kDeadline);
  }
}

}  // namespace hvpipe
