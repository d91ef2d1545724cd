// Makes a transport for each use, and maps the memory of the host.
#include "progress/socket_network.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>
#include <thread>

#include "base/event_log.h"
#include "collectives/tags.h"

namespace hvpipe {
namespace {

// The channels of a network. Groups have those from kFirstGroup on.
enum Use : SocketMesh::Channel {
  kRing,
  kMessages,
  kCopies,
  kNamed,
  kTexts,
  kRequests,
  kBarrier,
  kFirstGroup
};

std::vector<int> Everyone(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Topology TopologyOf(int rank, const std::vector<int>& hosts) {
  Topology found;
  const int mine = hosts[static_cast<std::size_t>(rank)];
  found.rank = rank;
  found.size = static_cast<int>(hosts.size());
  found.local_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), mine));
  found.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, mine));
  found.hosts = static_cast<int>(std::set<int>(hosts.begin(), hosts.end()).size());
  found.first_on_host = static_cast<int>(std::find(hosts.begin(), hosts.end(), mine) - hosts.begin());
  return found;
}

// The ranks of this local rank on all hosts that have one.
std::vector<int> Across(int local_rank, const std::vector<int>& hosts) {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    if (TopologyOf(rank, hosts).local_rank == local_rank) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

std::size_t SharedFileBytes(std::size_t slot_bytes, int ranks) {
  constexpr std::size_t kWindows = 2;
  return kWindows * static_cast<std::size_t>(ranks) * SharedWindow::Bytes(Network::WindowOptions(slot_bytes));
}

// A ring signals before it sends, so its messages need no confirmation, and those of the exchanges answer
// each other.
SocketNetwork::SocketNetwork(std::shared_ptr<SocketMesh> mesh, const HostPlan& plan,
                             const EngineOptions& options, Counters& counters)
    : Network(options, TopologyOf(mesh->rank(), plan.hosts), counters),
      mesh_(std::move(mesh)),
      channels_(mesh_->NewChannels()),
      barrier_(*mesh_, channels_ + kBarrier, Everyone(topology_.size), SocketMesh::CompletesWhen::kSent) {
  const auto make = [&](Use use, std::vector<int> ranks, SocketMesh::CompletesWhen when) {
    return std::make_unique<SocketTransport>(*mesh_, channels_ + use, std::move(ranks), when);
  };
  const std::vector<int> everyone = Everyone(topology_.size);
  ring_ = make(kRing, everyone, SocketMesh::CompletesWhen::kSent);
  messages_ = make(kMessages, everyone, SocketMesh::CompletesWhen::kReceived);
  copies_ = make(kCopies, everyone, SocketMesh::CompletesWhen::kReceived);
  named_ = make(kNamed, everyone, SocketMesh::CompletesWhen::kSent);
  texts_ = std::make_unique<SocketTextMessages>(*mesh_, channels_ + kTexts);
  requests_ = std::make_unique<SocketTextMessages>(*mesh_, channels_ + kRequests);
  if (plan.shared_file.empty() || topology_.hosts == topology_.size) return;
  // As many ranks have the last place of this host as there are hosts, and none has a later one.
  even_ = topology_.hosts > 1 && topology_.local_size * topology_.hosts == topology_.size &&
          static_cast<int>(Across(topology_.local_size - 1, plan.hosts).size()) == topology_.hosts;
  if (even_ || topology_.local_rank == 0)
    across_ = make(kRing, Across(topology_.local_rank, plan.hosts), SocketMesh::CompletesWhen::kSent);
  const SharedWindow::Options window = WindowOptions(options.slot_bytes);
  const std::size_t bytes = SharedWindow::Bytes(window);
  const auto map = [&](std::size_t number) {
    const std::size_t offset = number * static_cast<std::size_t>(topology_.local_size) * bytes;
    return std::make_unique<SharedWindow>(
        std::make_unique<FileHostMemory>(plan.shared_file, offset, topology_.local_rank, topology_.local_size,
                                         bytes),
        window);
  };
  reduce_window_ = map(0);
  (topology_.hosts > 1 ? broadcast_window_ : named_window_) = map(1);
}

// The channel of a group follows from its ranks, because groups may be made in any order. A group that is
// made again gets another one.
std::unique_ptr<Transport> SocketNetwork::MakeGroup(const std::vector<int>& ranks) {
  const std::lock_guard<std::mutex> lock(grouped_mutex_);
  std::string name = std::to_string(std::count(grouped_.begin(), grouped_.end(), ranks));
  for (const int rank : ranks) name += "," + std::to_string(rank);
  grouped_.push_back(ranks);
  const SocketMesh::Channel number =
      kFirstGroup + Hash(name) % ((SocketMesh::Channel{1} << 32) - kFirstGroup);
  return std::make_unique<SocketTransport>(*mesh_, channels_ + number, ranks,
                                           SocketMesh::CompletesWhen::kSent);
}

// The mesh may still write into a barrier for which a rank did not come.
SocketNetwork::~SocketNetwork() {
  for (auto& barrier : barriers_) {
    if (!barrier->done()) (void)barrier.release();
  }
}

bool SocketNetwork::Barrier(double patience_s) {
  barriers_.push_back(std::make_unique<ControlExchange>(barrier_, counters_, Record{}, 0, nullptr,
                                                        kControlTag, std::vector<char>{}));
  const double deadline_s = Now() + patience_s;
  while (Now() < deadline_s) {
    try {
      mesh_->Poll();
      (void)barriers_.back()->Step();
    } catch (const Error&) {
      return false;  // a rank has gone
    }
    if (barriers_.back()->done()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return false;
}

Connect OverSockets(std::shared_ptr<SocketMesh> mesh, HostPlan plan) {
  return [mesh = std::move(mesh), plan = std::move(plan)](const EngineOptions& options, Counters& counters) {
    return std::make_unique<SocketNetwork>(mesh, plan, options, counters);
  };
}

}  // namespace hvpipe
