// Connects the parts of the engine, and ends them in order.
#include "engine/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/exit_timer.h"
#include "base/shared_slot.h"
#include "gpu/nccl_setup.h"

namespace hvpipe {
namespace {

constexpr double kLeaveS = 10;  // the longest wait for the other ranks in Stop

}  // namespace

Engine::Engine(const Connect& connect, const EngineOptions& options)
    : telemetry_(options.trace, options.flight_path),
      connection_(connect(options, telemetry_.counters)),
      network_(*connection_),
      route_(network_, telemetry_.counters),
      progress_(std::make_unique<Progress>(ProgressOptions(), telemetry_)),
      agreement_(network_),
      messenger_(*progress_, network_),
      calls_(*progress_, network_, agreement_, route_),
      named_calls_(*progress_, network_, messenger_),
      device_calls_(*progress_, calls_, route_, device_),
      device_messages_(*progress_, network_, messenger_, device_, telemetry_.counters),
      buckets_(*progress_, agreement_, route_, device_, telemetry_),
      watchdog_(
          network_.texts(), telemetry_, [this] { return progress_->WaitsNow(); },
          [this](const Error& error) { Fail(error); }) {
  telemetry_.flight.SetRank(network_.topology().rank, network_.topology().size);
  progress_->Wake();  // rank 0 looks for calls by name of the others
}

// Progress calls these only after something was enqueued, so all parts exist by then.
Progress::Options Engine::ProgressOptions() {
  Progress::Options options;
  options.timeout_s = network_.options().timeout_s;
  options.first_steps_timeout_s = network_.options().first_steps_timeout_s;
  options.spins = network_.crowded() ? 0 : network_.Spins();
  options.nap_s = [this](int idle_passes, double idle_s) {
    return named_calls_.eager(idle_s) ? 0 : network_.NapS(idle_passes, *messenger_.awaited() > 0);
  };
  options.most_nap_s = [this] { return named_calls_.serve_s(); };
  options.stall_s = network_.options().stall_warn_s;
  options.stalled = [this](const Stall& stall) { watchdog_.Report(stall); };
  options.report = [this] { return watchdog_.report(); };
  options.begin_pass = [this](double now_s) {
    network_.BeginPass(now_s);
    return named_calls_.Serve(now_s);
  };
  options.failed = [this] {
    const Error error = *progress_->error();
    if (buckets_.lost_sums()) EndWithoutUpdate(error);
    device_messages_.EndPosted(error);
    device_.Abort();
  };
  return options;
}

// An abort of NCCL would let the device go on behind sums that are not complete. The program might then save
// the weights before it hears of the error.
void Engine::EndWithoutUpdate(const Error& error) const {
  const Topology& topology = network_.topology();
  EndProcess(
      "\nhvpipe: rank " + std::to_string(topology.rank) + " of " + std::to_string(topology.size) +
          " exits with code 1, because sums of gradients that its GPU waits for will not be complete. " +
          error.what() + "\n",
      network_.options().abort_marker);
}

// Frees nothing that MPI holds, unless Stop did: freeing is collective, but ranks destroy their engines at
// any time. After an error all buffers stay, because messages that were under way may still use them.
Engine::~Engine() {
  watchdog_.Stop();
  progress_->Stop();
  device_.Abort();  // before the buffers that are registered with NCCL are freed; does nothing after Close
  if (!progress_->error() && device_.Aborted(kLeaveS) && buckets_.WaitUntilRead(kLeaveS)) {
    progress_.reset();  // ends the operations, which use the parts
    return;
  }
  (void)progress_.release();
  buckets_.Leak();
  device_.Leak();
}

void Engine::Watch(bool on) {
  telemetry_.flight.Record(on);
  watchdog_.Watch(on);
}

// In one turn, so that a second caller finds the device, and no other thread's call comes between.
Engine::DeviceUse Engine::UseDevice(const DeviceOptions& options, const Interrupt& interrupt) {
  const Turns::Turn turn = calls_.TakeTurn(interrupt);
  if (!device_.empty()) throw Error("use_device was called before: call it once.", ErrorKind::kUsage);
  NcclSetup setup(options, network_, calls_, messenger_, progress_->limit_s() / 2, interrupt);
  if (const auto failure = setup.Open()) return {false, *failure};
  return {true, device_.Set(setup.Connect()).route};
}

// After an error the peers may be gone. Messages that they had sent may still arrive and must find their
// communicator: if it was freed, Open MPI has been seen to abort in the next communicator that took its
// place. So either all ranks free, or none does.
void Engine::Stop() {
  if (!progress_->Close()) return;
  const double patience_s = std::min(kLeaveS, network_.options().timeout_s);
  progress_->Drain(patience_s);
  // TensorFlow may have enqueued more than the device has run.
  if (buckets_.awaits_sums()) progress_->Drain(network_.options().timeout_s);
  watchdog_.Stop();
  progress_->Stop();
  device_messages_.EndPosted(ShutDown());
  if (progress_->error()) {
    (void)device_.Aborted(patience_s);
    return;
  }
  // Two barriers. A rank that comes after the others have given up passes the first one at once, because they
  // had begun it. Only the second one shows that they are still here. NCCL is closed after that, because it
  // waits for all ranks.
  if (!network_.Barrier(patience_s) || !network_.Barrier(patience_s)) return;
  if (!device_.Close(patience_s)) return;
  network_.Free();
  telemetry_.flight.Close();
}

namespace {

SharedSlot<Engine> default_slot;

}  // namespace

void SetDefaultEngine(std::shared_ptr<Engine> engine) { default_slot.Set(std::move(engine)); }

std::shared_ptr<Engine> DefaultEngine() { return default_slot.Get(); }

}  // namespace hvpipe
