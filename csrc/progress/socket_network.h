// The network over TCP sockets.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "progress/network.h"
#include "transport/socket_mesh.h"

namespace hvpipe {

// Where ranks are, and the memory that those of a host share.
struct HostPlan {
  std::vector<int> hosts;  // the number of its host, by rank
  // A file of zeros that all ranks of this host can map, with at least SharedFileBytes; "": none.
  std::string shared_file;
};

// The bytes of the file in which `ranks` ranks of a host have their windows.
std::size_t SharedFileBytes(std::size_t slot_bytes, int ranks);

class SocketNetwork : public Network {
 public:
  SocketNetwork(std::shared_ptr<SocketMesh> mesh, const HostPlan& plan, const EngineOptions& options,
                Counters& counters);

  ~SocketNetwork() override;
  int Spins() const override { return 16; }  // a look at the sockets takes some 1 us
  bool Barrier(double patience_s) override;
  std::vector<int> Lost() override { return mesh_->Lost(); }

 protected:
  std::unique_ptr<Transport> MakeGroup(const std::vector<int>& ranks) override;
  void Poll() override { mesh_->Poll(); }

 private:
  const std::shared_ptr<SocketMesh> mesh_;
  const SocketMesh::Channel channels_;  // the first of its own
  std::mutex grouped_mutex_;
  std::vector<std::vector<int>> grouped_;  // the ranks of each group
  SocketTransport barrier_;
  std::vector<std::unique_ptr<ControlExchange>> barriers_;  // kept: the mesh writes into those without an end
};

// Several engines and other users may share a mesh.
Connect OverSockets(std::shared_ptr<SocketMesh> mesh, HostPlan plan);

}  // namespace hvpipe
