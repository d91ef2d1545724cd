// Checks that each rank has its own device, and makes NCCL communicators of all ranks or of those of a host.
#include "device/nccl_setup.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "core/aligned_buffer.h"

namespace hvpipe {
namespace {

// What a rank tells the others before NCCL connects them.
struct NcclOffer {
  int version;  // of its NCCL; 0: none
  NcclSpan span;
  int first_on_host;
};

// The address of an NCCL communicator, from the rank that creates it.
struct NcclAddress {
  nccl::UniqueId id;
  int failed;
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

// The rank with this local rank on each host, in ascending order. Empty unless every host has `local_size`
// ranks.
std::vector<int> RailOf(const std::vector<NcclOffer>& all, std::size_t local_rank, std::size_t local_size) {
  std::map<int, std::vector<int>> hosts;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    hosts[all[rank].first_on_host].push_back(static_cast<int>(rank));
  }
  std::vector<int> rail;
  for (const auto& [first, ranks] : hosts) {
    if (ranks.size() != local_size) return {};
    rail.push_back(ranks[local_rank]);
  }
  std::sort(rail.begin(), rail.end());
  return rail;
}

DeviceOwner OwnerOf(const Device& device, int first_on_host) {
  const auto write = [](const std::string& text, auto& place) {
    std::copy_n(text.begin(), std::min(text.size(), place.size() - 1), place.begin());
  };
  std::array<char, 128> host_name{};
  if (gethostname(host_name.data(), host_name.size() - 1) != 0) host_name[0] = '\0';
  const Device::Identity identity = device.Identify();
  DeviceOwner owner;
  write(identity.device, owner.device);
  write(identity.board, owner.board);
  write(std::string(host_name.data()) + ": " + device.Name(), owner.name);
  owner.first_on_host = first_on_host;
  return owner;
}

}  // namespace

NcclSetup::NcclSetup(const DeviceOptions& options, const Network& network, BlockingCalls& calls,
                     Messenger& messenger, const Interrupt& interrupt)
    : options_(options),
      network_(network),
      topology_(network.topology()),
      timeout_s_(network.options().timeout_s),
      calls_(calls),
      messenger_(messenger),
      interrupt_(interrupt) {}

std::unique_ptr<RankDevice> NcclSetup::Run() {
  device_ = std::make_unique<RankDevice>(options_);
  device_->route = topology_.size == 1 ? "one rank" : "through the host: no NCCL was named";
  if (topology_.size > 1 && network_.messages() == nullptr) {
    device_->route = "through the host: NCCL needs MPI";
  } else if (topology_.size > 1 && !options_.nccl.empty()) {
    ConnectByNccl();
  }
  if (device_->nccl_connects_all()) {
    std::vector<int> all(static_cast<std::size_t>(topology_.size));
    std::iota(all.begin(), all.end(), 0);
    device_->ready_signals = &AddTransport(all);
  }
  calls_.Agree("choice of devices", 0, interrupt_);
  return std::move(device_);
}

Transport& NcclSetup::AddTransport(const std::vector<int>& ranks) {
  return *network_.TransportOf(messenger_.AddGroup(ranks, interrupt_));
}

// Connects all ranks or none. A rank throws only after every rank has heard whether NCCL can be used.
void NcclSetup::ConnectByNccl() {
  NcclOffer mine{0, options_.span, topology_.first_on_host};
  std::string why;
  try {
    device_->library = std::make_unique<NcclLibrary>(options_.nccl);
    mine.version = device_->library->version();
  } catch (const Error& error) {
    why = error.what();
  }
  std::vector<NcclOffer> all(static_cast<std::size_t>(topology_.size));
  calls_.AllGather(&mine, all.data(), sizeof mine, "choice of NCCL", interrupt_);
  const bool same = std::all_of(all.begin(), all.end(), [&](const NcclOffer& other) {
    return other.version == mine.version && other.span == mine.span;
  });
  if (why.empty() && !same) {
    why = "the ranks have different versions of NCCL or another HVPIPE_NCCL_SPAN, or some have no NCCL";
  }
  if (why.empty() && !options_.may_share && !HaveOwnBoards()) {
    why = "NCCL does not join parts of one GPU (MIG)";
  }
  if (!why.empty()) {
    if (options_.nccl_required)
      throw Error("NCCL should serve all ranks. Received: " + why, ErrorKind::kUsage);
    device_->route = "through the host: " + why;
    return;
  }
  if (options_.span == NcclSpan::kHost && topology_.hosts > 1) {
    ConnectInsideHosts(RailOf(all, static_cast<std::size_t>(topology_.local_rank),
                              static_cast<std::size_t>(topology_.local_size)));
  } else {
    MakeCommunicator({topology_.rank, topology_.size, 0});
    device_->route = "by NCCL " + device_->library->VersionText();
  }
}

// Throw if ranks share a device: NCCL would hang or fail without naming the cause. Return false if two ranks
// have parts (MIG) of one board, which NCCL takes for one device.
bool NcclSetup::HaveOwnBoards() {
  const DeviceOwner mine = OwnerOf(*device_->device, topology_.first_on_host);
  std::vector<DeviceOwner> all(static_cast<std::size_t>(topology_.size));
  calls_.AllGather(&mine, all.data(), sizeof mine, "devices of all ranks", interrupt_);
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

// NCCL inside each host, MPI between hosts. `rail` comes from RailOf.
void NcclSetup::ConnectInsideHosts(const std::vector<int>& rail) {
  if (rail.empty()) {
    device_->route =
        "through the host: NCCL stays inside hosts (HVPIPE_NCCL_SPAN=host) only where all have the same "
        "number of ranks. Received: " +
        std::to_string(topology_.size) + " ranks on " + std::to_string(topology_.hosts) + " hosts";
  } else if (topology_.local_size == 1) {
    device_->route =
        "through the host: NCCL is to stay inside hosts (HVPIPE_NCCL_SPAN=host), and each has one rank";
  } else {
    MakeCommunicator({topology_.local_rank, topology_.local_size, topology_.first_on_host});
    device_->rail = &AddTransport(rail);
    device_->route =
        "by NCCL " + device_->library->VersionText() + " inside hosts, through the host and MPI between them";
  }
}

// All ranks call this, whichever communicator each of them will be in.
void NcclSetup::MakeCommunicator(const NcclPlace& place) {
  NcclAddress mine{};
  std::optional<Error> error;
  try {
    const CurrentDevice current(*device_->device);
    if (topology_.rank == place.first) mine.id = device_->library->NewId();
  } catch (const Error& failed) {
    error = failed;
    mine.failed = 1;
  }
  std::vector<NcclAddress> all(static_cast<std::size_t>(topology_.size));
  calls_.AllGather(&mine, all.data(), sizeof mine, "NCCL's addresses", interrupt_);
  if (error) throw *error;
  const auto failed =
      std::find_if(all.begin(), all.end(), [](const NcclAddress& of) { return of.failed != 0; });
  if (failed != all.end()) {
    throw Error("NCCL did not start on rank " + std::to_string(failed - all.begin()) +
                    ". See the error of that rank.",
                ErrorKind::kPeer);
  }
  const CurrentDevice current(*device_->device);
  device_->ranks =
      std::make_unique<NcclCommunicator>(*device_->library, device_->device, place.rank, place.size,
                                         all[static_cast<std::size_t>(place.first)].id);
  device_->ranks->WaitUntilReady(timeout_s_, "joining " + std::to_string(place.size) + " ranks", interrupt_);
  AgreeOnNcclMemory();
}

// All ranks must register a buffer or none, so each rank first tries whether it can.
void NcclSetup::AgreeOnNcclMemory() {
  const char able = CanRegisterMemory() ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(topology_.size));
  calls_.AllGather(&able, all.data(), sizeof able, "choice of memory", interrupt_);
  device_->nccl_memory = std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

// Requires that the device is current.
bool NcclSetup::CanRegisterMemory() {
  const NcclLibrary& library = *device_->library;
  if (!library.has_memory()) return false;
  bool able = false;
  void* memory = nullptr;
  try {
    const std::size_t free_before = device_->device->FreeMemory().free;
    memory = library.Allocate(kAlignment);
    const bool small = free_before <= device_->device->FreeMemory().free + kLargestUnitBytes;
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
