// How all ranks decide together whether and how NCCL connects their devices.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/blocking_calls.h"
#include "core/messenger.h"
#include "core/network.h"
#include "device/rank_device.h"

namespace hvpipe {

// Opens this rank's device and connects it to the others. Collective: every step tells all ranks what each of
// them found, so that all take the same way, or all throw.
//
// Threads: made and used by one caller of UseDevice.
class NcclSetup {
 public:
  NcclSetup(const DeviceOptions& options, const Network& network, BlockingCalls& calls, Messenger& messenger,
            const Interrupt& interrupt);

  // The device, ready for collectives and messages. Call once.
  std::unique_ptr<RankDevice> Run();

 private:
  // This rank's place in an NCCL communicator, and the rank that creates its address.
  struct NcclPlace {
    int rank, size;
    int first;
  };

  void ConnectByNccl();
  std::string WhyNotNccl();
  bool HaveOwnBoards();
  void ConnectInsideHosts(const std::vector<int>& rail);
  void MakeCommunicator(const NcclPlace& place);
  void AgreeOnNcclMemory();
  bool CanRegisterMemory();
  Transport& AddTransport(const std::vector<int>& ranks);

  const DeviceOptions& options_;
  const Network& network_;
  const Topology& topology_;
  const double timeout_s_;
  BlockingCalls& calls_;
  Messenger& messenger_;
  const Interrupt& interrupt_;
  std::unique_ptr<RankDevice> device_;
};

}  // namespace hvpipe
