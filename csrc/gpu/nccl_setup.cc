// Checks that each rank has its own device, and makes the NCCL communicator of all ranks.
#include "gpu/nccl_setup.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "gpu/device_buffer.h"

namespace hvpipe {
namespace {

const char* const kStart = "start of NCCL";
const char* const kFirstSums = "first sums of NCCL";

// NCCL chooses its algorithm by size, and allocates for each when it first uses it.
constexpr std::size_t kSmallBytes = 1 << 10, kLargeBytes = 16 << 20;

// Why an attempt failed on a rank, with its host.
using Reason = std::array<char, 1024>;

// What a rank tells the others after an attempt.
constexpr double kDone = 0, kFailed = 1, kGaveUp = 2;  // gave up: because another rank has failed

class GaveUp : public Error {
 public:
  GaveUp() : Error("Another rank failed here.", ErrorKind::kPeer) {}
};

// What a rank tells the others about its device.
struct DeviceOwner {
  std::array<char, 64> device{}, board{};
  std::array<char, 256> name{};  // of host and device
  int first_on_host = 0;
};

// NCCL's memory comes in units of 2 MiB, or of 512 MiB if NVSwitches add up (multicast). A bucket would take
// one unit.
constexpr std::size_t kLargestUnitBytes = 2 << 20;

// The place ends with a zero.
template <typename Place>
void Write(const std::string& text, Place& place) {
  std::copy_n(text.begin(), std::min(text.size(), place.size() - 1), place.begin());
}

std::string HostName() {
  std::array<char, 128> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

DeviceOwner OwnerOf(const Device& device, int first_on_host) {
  const Device::Identity identity = device.Identify();
  DeviceOwner owner;
  Write(identity.device, owner.device);
  Write(identity.board, owner.board);
  Write(HostName() + ": " + device.Name(), owner.name);
  owner.first_on_host = first_on_host;
  return owner;
}

}  // namespace

NcclSetup::NcclSetup(const DeviceOptions& options, const Network& network, BlockingCalls& calls,
                     Messenger& messenger, double timeout_s, const Interrupt& interrupt)
    : options_(options),
      network_(network),
      topology_(network.topology()),
      timeout_s_(timeout_s),
      calls_(calls),
      messenger_(messenger),
      interrupt_(interrupt) {}

std::optional<std::string> NcclSetup::Together(const std::string& what,
                                               const std::function<void()>& attempt) {
  double mine = kDone;
  own_.reset();
  try {
    attempt();
  } catch (const GaveUp&) {
    mine = kGaveUp;
  } catch (const Error& error) {
    own_ = error;
    mine = kFailed;
  } catch (const std::bad_alloc& error) {
    own_ = ErrorOf(error);
    mine = kFailed;
  }
  const std::vector<double> all = calls_.Agree(what, mine, interrupt_);
  if (std::all_of(all.begin(), all.end(), [](double each) { return each == kDone; })) return std::nullopt;
  const auto first = std::find(all.begin(), all.end(), kFailed);
  if (first == all.end()) throw Error("internal: ranks gave up, but none has failed");
  Reason reason{};
  if (own_) Write(HostName() + ": " + own_->what(), reason);
  const std::vector<Reason> reasons = OfAllRanks(reason, what + ": what failed");
  const auto rank = static_cast<std::size_t>(first - all.begin());
  const auto failed = std::count(all.begin(), all.end(), kFailed);
  std::string text = "rank " + std::to_string(rank) + " on " + reasons[rank].data();
  if (failed > 1)
    text += " (" + std::to_string(failed) + " of " + std::to_string(all.size()) + " ranks failed)";
  return text;
}

// A rank that has failed goes on to report it, and the rank below it gets its record early.
void NcclSetup::CheckOthers(const std::string& what) {
  const std::optional<Record> record = calls_.EarlyRecord();
  if (record && record->signature == Hash(what) && record->samples != kDone) throw GaveUp();
}

template <typename Value>
std::vector<Value> NcclSetup::OfAllRanks(const Value& mine, const std::string& what) {
  auto all = std::make_unique<std::vector<Value>>(static_cast<std::size_t>(topology_.size));
  try {
    Value& own = (*all)[static_cast<std::size_t>(topology_.rank)] = mine;
    const std::vector<std::size_t> bytes(all->size(), sizeof mine);
    calls_.Gather(&own, all->data(), bytes, std::nullopt, what, interrupt_);
  } catch (...) {
    (void)all.release();  // what is still under way may be written there
    throw;
  }
  return std::move(*all);
}

std::optional<std::string> NcclSetup::Open() {
  auto failure = Together("opening of GPUs", [this] {
    if (!options_.refusal.empty()) throw Error(options_.refusal, ErrorKind::kUsage);
    device_ = std::make_unique<RankDevice>(options_);
  });
  if (failure) device_.reset();
  return failure;
}

std::unique_ptr<RankDevice> NcclSetup::Connect() {
  device_->route = topology_.size == 1 ? "one rank" : "through the host: no NCCL was named";
  if (topology_.size > 1 && !options_.nccl.empty()) ConnectByNccl();
  if (device_->messages_by_nccl()) {
    std::vector<int> all(static_cast<std::size_t>(topology_.size));
    std::iota(all.begin(), all.end(), 0);
    device_->ready_signals = &network_.TransportOf(messenger_.AddGroup(all, interrupt_));
  }
  calls_.Agree("choice of devices", 0, interrupt_);
  return std::move(device_);
}

void NcclSetup::GoThroughHost(const std::string& why) {
  if (options_.nccl_required) throw Error("NCCL should serve all ranks. Received: " + why, ErrorKind::kUsage);
  device_->route = "through the host: " + why;
}

// Connects all ranks or none. A rank throws only after every rank has heard whether NCCL can be used.
void NcclSetup::ConnectByNccl() {
  const auto failure =
      Together("choice of NCCL", [this] { device_->library = std::make_unique<NcclLibrary>(options_.nccl); });
  if (failure) return GoThroughHost(*failure);
  const int mine = device_->library->version();
  const std::vector<int> all = OfAllRanks(mine, "versions of NCCL");
  const bool same = std::all_of(all.begin(), all.end(), [&](int other) { return other == mine; });
  if (!same) return GoThroughHost("the ranks have different versions of NCCL");
  if (!options_.may_share && !HaveOwnBoards()) {
    return GoThroughHost("NCCL does not join parts of one GPU (MIG)");
  }
  if (!MakeCommunicator()) return;
  device_->route = "by NCCL " + device_->library->VersionText();
  if (!device_->messages_by_nccl()) {
    device_->route += "; a pipeline's tensors through the host, because they need NCCL 2.27 or later";
  }
}

// Throw if ranks share a device: NCCL would hang or fail without naming the cause. Return false if two ranks
// have parts (MIG) of one board, which NCCL takes for one device.
bool NcclSetup::HaveOwnBoards() {
  const DeviceOwner mine = OwnerOf(*device_->device, topology_.first_on_host);
  const std::vector<DeviceOwner> all = OfAllRanks(mine, "devices of all ranks");
  // Every rank checks all ranks, so all throw together and none waits for one that has ended.
  bool own_boards = true;
  for (auto second = all.begin(); second != all.end(); ++second) {
    const auto first = std::find_if(all.begin(), second,
                                    [&](const DeviceOwner& one) { return one.device == second->device; });
    if (first != second) {
      throw Error(
          "Each rank should have a GPU of its own: start at most as many ranks on a host as it has, or go "
          "through the host with HVPIPE_NCCL_LIBRARY=none. Received: ranks " +
              std::to_string(first - all.begin()) + " and " + std::to_string(second - all.begin()) + " on " +
              first->name.data(),
          ErrorKind::kUsage);
    }
    own_boards &= std::none_of(all.begin(), second, [&](const DeviceOwner& one) {
      return one.first_on_host == second->first_on_host && one.board == second->board;
    });
  }
  return own_boards;
}

bool NcclSetup::MakeCommunicator() {
  nccl::UniqueId mine{};
  auto failure = Together("NCCL's address", [&] {
    const CurrentDevice current(*device_->device);
    if (topology_.rank == 0) mine = device_->library->NewId();
  });
  if (!failure) {
    const std::vector<nccl::UniqueId> all = OfAllRanks(mine, "NCCL's address");
    failure = Together(kStart, [&] { Join(all.front()); });
  }
  if (!failure) {
    AgreeOnNcclMemory();
    failure = Together(kFirstSums, [&] {
      WarmUp(kSmallBytes);
      WarmUp(kLargeBytes);
    });
  }
  if (!failure) return true;
  device_->ranks.reset();  // aborts
  device_->nccl_memory = false;
  const std::string why = "NCCL did not start on " + *failure;
  if (options_.nccl_required) throw own_ ? *own_ : Error(why, ErrorKind::kPeer);
  GoThroughHost(why);
  return false;
}

void NcclSetup::Join(const nccl::UniqueId& id) {
  const CurrentDevice current(*device_->device);
  device_->ranks = std::make_unique<NcclCommunicator>(*device_->library, device_->device, topology_.rank,
                                                      topology_.size, id);
  device_->ranks->WaitUntilReady(timeout_s_, "joining " + std::to_string(topology_.size) + " ranks",
                                 [this] { Interrupted(kStart); });
}

// Call each collective that buckets and blocking calls will use. Later TensorFlow may hold all memory, which
// NCCL needs for its first collectives.
void NcclSetup::WarmUp(std::size_t bytes) {
  NcclCommunicator& ranks = *device_->ranks;
  const CurrentDevice current(*device_->device);
  const auto shares = static_cast<std::size_t>(ranks.size());
  const std::size_t count = (bytes / sizeof(float) + shares - 1) / shares * shares;
  auto buffer = std::make_unique<DeviceBuffer>(*device_, count, DType::kFloat32);
  void* const data = buffer->data();
  const auto run = [&](const std::function<void(Device::Stream)>& call) {
    call(device_->stream.get());
    ranks.WaitUntilReady(timeout_s_, kFirstSums, [this] { Interrupted(kFirstSums); });
    device_->device->Record(buffer->moved(), device_->stream.get());
    const auto arrived = [&] { return device_->device->Reached(buffer->moved()); };
    ranks.WaitUntil(arrived, timeout_s_, kFirstSums, [this] { Interrupted(kFirstSums); });
  };
  try {
    buffer->Register();
    run([&](Device::Stream on) { ranks.ReduceScatter(data, count, DType::kFloat32, on); });
    run([&](Device::Stream on) { ranks.AllGather(data, count, DType::kFloat32, on); });
    run([&](Device::Stream on) { ranks.AllReduce(data, data, count, DType::kFloat32, on); });
    run([&](Device::Stream on) { ranks.Broadcast(data, count * sizeof(float), 0, on); });
    buffer->Deregister();
  } catch (...) {
    (void)buffer.release();  // the device may still use it
    throw;
  }
}

void NcclSetup::Interrupted(const char* what) {
  interrupt_();
  CheckOthers(what);
}

// All ranks must register a buffer or none, so each rank first tries whether it can.
void NcclSetup::AgreeOnNcclMemory() {
  const CurrentDevice current(*device_->device);
  const char able = CanRegisterMemory() ? 1 : 0;
  const std::vector<char> all = OfAllRanks(able, "choice of memory");
  device_->nccl_memory = std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

// Requires that the device is current.
bool NcclSetup::CanRegisterMemory() {
  const NcclLibrary& library = *device_->library;
  if (!library.has_memory()) return false;
  bool able = false;
  void* memory = nullptr;
  try {
    memory = library.Allocate(kAlignment);
    const bool small = device_->device->AllocatedBytes(memory) <= kLargestUnitBytes;
    if (void* const registration = small ? device_->ranks->Register(memory, kAlignment) : nullptr) {
      void* const registered = std::exchange(memory, nullptr);  // not freed if Deregister throws
      device_->ranks->Deregister(registration);
      memory = registered;
      able = true;
    }
  } catch (const Error&) {  // buffers then come from the device, as before NCCL 2.19
  }
  if (memory != nullptr) library.Free(memory);
  return able;
}

}  // namespace hvpipe
