// Ranks and their devices: that each has its own, which ranks NCCL joins, and whether it has memory for them.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "core/engine.h"

namespace hvpipe {

std::string Engine::UseDevice(const DeviceOptions& options, const Interrupt& interrupt) {
  if (device_) throw Error("The engine has its device already.", ErrorKind::kUsage);
  auto side = std::make_unique<DeviceSide>(options);
  side->way = size_ == 1 ? "one rank" : "through the host: no NCCL was named";
  if (size_ > 1 && !options.nccl.empty()) JoinNccl(*side, options, interrupt);
  if (side->nccl_joins_all()) {
    std::vector<int> all(static_cast<std::size_t>(size_));
    std::iota(all.begin(), all.end(), 0);
    const int group = AddGroup(all, interrupt);
    const std::lock_guard<std::mutex> lock(mutex_);
    side->words = groups_[static_cast<std::size_t>(group)]->transport.get();
  }
  Agree("choice of devices", 0, interrupt);
  const std::lock_guard<std::mutex> lock(mutex_);
  device_ = std::move(side);
  return device_->way;
}

// Throws where ranks share a device: NCCL does not say so, but hangs or fails somewhere inside. False where
// they have parts (MIG) of one board, which NCCL takes for one device.
bool Engine::HaveOwnBoards(const Device& device, const Interrupt& interrupt) {
  struct Owner {
    std::array<char, 64> device{}, board{};
    std::array<char, 256> name{};  // of host and device
    int host = 0;
  };
  const auto write = [](const std::string& text, auto& place) {
    std::copy_n(text.begin(), std::min(text.size(), place.size() - 1), place.begin());
  };
  std::array<char, 128> host_name{};
  if (gethostname(host_name.data(), host_name.size() - 1) != 0) host_name[0] = '\0';
  const Device::Identity identity = device.Which();
  Owner mine;
  write(identity.device, mine.device);
  write(identity.board, mine.board);
  write(std::string(host_name.data()) + ": " + device.Name(), mine.name);
  mine.host = host_;
  std::vector<Owner> all(static_cast<std::size_t>(size_));
  AllGather(&mine, all.data(), sizeof mine, "devices of all ranks", interrupt);
  // Every rank sees all of them, and all end: none waits for one that has ended.
  bool own_boards = true;
  for (auto second = all.begin(); second != all.end(); ++second) {
    const auto first =
        std::find_if(all.begin(), second, [&](const Owner& one) { return one.device == second->device; });
    if (first != second) {
      throw Error(
          "Each rank should have a GPU of its own: start at most as many ranks on a host as it has, or go "
          "through the host with HVPIPE_NCCL_LIBRARY=none. Received: ranks " +
              std::to_string(first - all.begin()) + " and " + std::to_string(second - all.begin()) + " on " +
              first->name.data(),
          ErrorKind::kUsage);
    }
    own_boards &= std::none_of(all.begin(), second, [&](const Owner& one) {
      return one.host == second->host && one.board == second->board;
    });
  }
  return own_boards;
}

namespace {

// What a rank says before NCCL joins it to others.
struct Joining {
  int version;  // of its NCCL; 0 where there is none
  NcclSpan span;
  int host;  // the first rank on its host
};

// Of an NCCL communicator, from the rank that makes it.
struct Address {
  nccl::UniqueId id;
  int failed;
};

// The rank at `place` on each host, in order; none where not every host has `local_size` ranks.
std::vector<int> RailOf(const std::vector<Joining>& all, std::size_t place, std::size_t local_size) {
  std::map<int, std::vector<int>> hosts;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    hosts[all[rank].host].push_back(static_cast<int>(rank));
  }
  std::vector<int> rail;
  for (const auto& [first, ranks] : hosts) {
    if (ranks.size() != local_size) return {};
    rail.push_back(ranks[place]);
  }
  std::sort(rail.begin(), rail.end());
  return rail;
}

}  // namespace

// All ranks by NCCL or none: so each says first whether it could, and whoever throws does so after that.
void Engine::JoinNccl(DeviceSide& side, const DeviceOptions& options, const Interrupt& interrupt) {
  Joining mine{0, options.span, host_};
  std::string why;
  try {
    side.library = std::make_unique<NcclLibrary>(options.nccl);
    mine.version = side.library->version();
  } catch (const Error& error) {
    why = error.what();
  }
  std::vector<Joining> all(static_cast<std::size_t>(size_));
  AllGather(&mine, all.data(), sizeof mine, "choice of NCCL", interrupt);
  const bool same = std::all_of(all.begin(), all.end(), [&](const Joining& other) {
    return other.version == mine.version && other.span == mine.span;
  });
  if (why.empty() && !same) {
    why = "the ranks have different versions of NCCL or another HVPIPE_NCCL_SPAN, or some have no NCCL";
  }
  if (why.empty() && !options.may_share && !HaveOwnBoards(*side.device, interrupt)) {
    why = "NCCL does not join parts of one GPU (MIG)";
  }
  if (!why.empty()) {
    if (options.nccl_required)
      throw Error("NCCL should serve all ranks. Received: " + why, ErrorKind::kUsage);
    side.way = "through the host: " + why;
    return;
  }
  if (options.span == NcclSpan::kHost && hosts_ > 1) {
    const auto place = static_cast<std::size_t>(local_rank_);
    JoinHosts(side, RailOf(all, place, static_cast<std::size_t>(local_size_)), interrupt);
  } else {
    JoinRanks(side, {rank_, size_, 0}, interrupt);
    side.way = "by NCCL " + side.library->VersionText();
  }
}

// NCCL inside each host; `rail` is RailOf for this rank's place.
void Engine::JoinHosts(DeviceSide& side, const std::vector<int>& rail, const Interrupt& interrupt) {
  if (rail.empty()) {
    side.way =
        "through the host: NCCL stays inside hosts (HVPIPE_NCCL_SPAN=host) only where all have the same "
        "number of ranks. Received: " +
        std::to_string(size_) + " ranks on " + std::to_string(hosts_) + " hosts";
  } else if (local_size_ == 1) {
    side.way =
        "through the host: NCCL is to stay inside hosts (HVPIPE_NCCL_SPAN=host), and each has one rank";
  } else {
    JoinRanks(side, {local_rank_, local_size_, host_}, interrupt);
    const int group = AddGroup(rail, interrupt);
    const std::lock_guard<std::mutex> lock(mutex_);
    side.rail = groups_[static_cast<std::size_t>(group)]->transport.get();
    side.way =
        "by NCCL " + side.library->VersionText() + " inside hosts, through the host and MPI between them";
  }
}

// Called by all ranks, whichever communicator each of them is to be in.
void Engine::JoinRanks(DeviceSide& side, const NcclPlace& place, const Interrupt& interrupt) {
  Address mine{};
  std::optional<Error> error;
  try {
    if (rank_ == place.first) mine.id = side.library->NewId();
  } catch (const Error& failed) {
    error = failed;
    mine.failed = 1;
  }
  std::vector<Address> all(static_cast<std::size_t>(size_));
  AllGather(&mine, all.data(), sizeof mine, "NCCL's addresses", interrupt);
  if (error) throw *error;
  const auto failed = std::find_if(all.begin(), all.end(), [](const Address& of) { return of.failed != 0; });
  if (failed != all.end()) {
    throw Error("NCCL did not start on rank " + std::to_string(failed - all.begin()) + ", which says why.",
                ErrorKind::kPeer);
  }
  const CurrentDevice current(*side.device);
  side.ranks = std::make_unique<NcclCommunicator>(*side.library, place.rank, place.size,
                                                  all[static_cast<std::size_t>(place.first)].id);
  side.ranks->WaitUntilReady(options_.timeout_s, "joining " + std::to_string(place.size) + " ranks",
                             interrupt);
  AgreeOnNcclMemory(side, interrupt);
}

namespace {

// NCCL's memory comes in pieces of 2 MiB; of 512 MiB where NVSwitches add up (multicast). A bucket takes one.
constexpr std::size_t kLargestPieceBytes = 2 << 20;

}  // namespace

// What one rank registers all must, so each tries first. The device is current.
void Engine::AgreeOnNcclMemory(DeviceSide& side, const Interrupt& interrupt) {
  char able = 0;
  if (side.library->has_memory()) {
    void* memory = nullptr;
    try {
      const std::size_t free_before = side.device->FreeRoom().free;
      memory = side.library->Allocate(kAlignment);
      const bool small = free_before <= side.device->FreeRoom().free + kLargestPieceBytes;
      if (void* const registration = small ? side.ranks->Register(memory, kAlignment) : nullptr) {
        void* const registered = std::exchange(memory, nullptr);  // not to be freed while it is
        side.ranks->Deregister(registration);
        memory = registered;
        able = 1;
      }
    } catch (const Error&) {  // then buffers are the device's own, as before NCCL 2.19
    }
    if (memory != nullptr) side.library->Free(memory);
  }
  std::vector<char> all(static_cast<std::size_t>(size_));
  AllGather(&able, all.data(), sizeof able, "choice of memory", interrupt);
  side.nccl_memory = std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
}

}  // namespace hvpipe
