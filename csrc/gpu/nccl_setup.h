// How all ranks decide together whether and how NCCL connects their devices.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/rank_device.h"
#include "progress/blocking_calls.h"
#include "progress/messenger.h"
#include "progress/network.h"

namespace hvpipe {

// Opens this rank's device and connects it to the others. Collective: every step tells all ranks what each of
// them found, so that all take the same way, or all throw.
//
// Threads: made and used by one caller of UseDevice.
class NcclSetup {
 public:
  // `timeout_s`: how long a rank may wait for NCCL. Shorter than the engine's limit: ranks whose NCCL has
  // failed wait that long for the others.
  NcclSetup(const DeviceOptions& options, const Network& network, BlockingCalls& calls, Messenger& messenger,
            double timeout_s, const Interrupt& interrupt);

  // Open the device on all ranks, or on none. If one cannot, returns which one and why; the engine can then
  // go on without devices.
  std::optional<std::string> Open();
  // Connect the devices. Returns this rank's, ready for collectives and messages.
  std::unique_ptr<RankDevice> Connect();

 private:
  // Try something on this rank, and hear how it went on all ranks. Returns why it failed on the first rank
  // where it did, the same on all ranks: "rank 1 on HOST: why". Sets own_.
  std::optional<std::string> Together(const std::string& what, const std::function<void()>& attempt);
  // Throw if a rank above this one has failed in `what`, which this rank is still trying.
  void CheckOthers(const std::string& what);
  template <typename Value>
  std::vector<Value> OfAllRanks(const Value& mine, const std::string& what);
  void ConnectByNccl();
  bool HaveOwnBoards();
  // Returns whether it could be made; otherwise data goes through the host.
  bool MakeCommunicator();
  void Join(const nccl::UniqueId& id);
  void WarmUp(std::size_t bytes);
  // Throw if the user or another rank's failure ends a wait for NCCL in `what`.
  void Interrupted(const char* what);
  void GoThroughHost(const std::string& why);
  void AgreeOnNcclMemory();
  bool CanRegisterMemory();

  const DeviceOptions& options_;
  const Network& network_;
  const Topology& topology_;
  const double timeout_s_;
  BlockingCalls& calls_;
  Messenger& messenger_;
  const Interrupt& interrupt_;
  std::optional<Error> own_;  // of the last attempt, if it failed on this rank
  std::unique_ptr<RankDevice> device_;
};

}  // namespace hvpipe
