// The engine of one rank: makes the parts below and connects them.
#pragma once

#include <memory>
#include <string>

#include "base/telemetry.h"
#include "engine/gradient_buckets.h"
#include "gpu/device_calls.h"
#include "gpu/device_messenger.h"
#include "gpu/rank_device.h"
#include "named/named_calls.h"
#include "progress/agreement.h"
#include "progress/blocking_calls.h"
#include "progress/engine_options.h"
#include "progress/messenger.h"
#include "progress/network.h"
#include "progress/progress.h"
#include "progress/reduce.h"
#include "progress/watchdog.h"

namespace hvpipe {

// Each part has a header that says which thread may call it and what its lock guards.
//
//   buckets, messenger, calls, named_calls, device_calls, device_messages     requests of the user
//   agreement, route, device                                     how they are served
//   progress                                                     runs their operations
//   network                                                      MPI or TCP, and shared memory
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Collective over the ranks that `connect` joins.
  Engine(const Connect& connect, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Topology& topology() const { return network_.topology(); }
  EventLog& log() { return telemetry_.log; }
  const EventLog& log() const { return telemetry_.log; }
  Counters counters() const { return telemetry_.counters; }

  FlightRecorder& flight() { return telemetry_.flight; }
  Watchdog& watchdog() { return watchdog_; }
  // Switch the flight recorder and the watchdog off and on, to measure what they cost.
  void Watch(bool on);

  GradientBuckets& buckets() { return buckets_; }
  Messenger& messenger() { return messenger_; }
  const Messenger& messenger() const { return messenger_; }
  BlockingCalls& calls() { return calls_; }
  Agreement& agreement() { return agreement_; }
  named::NamedCalls& named_calls() { return named_calls_; }
  DeviceCalls& device_calls() { return device_calls_; }
  DeviceMessenger& device_messages() { return device_messages_; }

  // Open this rank's device. All ranks call this before any call with device memory. If one of them cannot
  // open its device, none is used, and the engine goes on without devices.
  struct DeviceUse {
    bool opened;
    std::string text;  // how GPU data will be sent, or which rank could not open its device and why
  };
  DeviceUse UseDevice(const DeviceOptions& options, const Interrupt& interrupt);
  // Throws unless it is open.
  RankDevice& device() const { return device_.get(); }

  // Two training steps have ended, so the ranks need no longer wait for compilers.
  void EndFirstSteps() { progress_->EndFirstSteps(); }

  // Fail all operations with an error: those under way and later ones.
  void Fail(const Error& error) { progress_->Fail(error); }
  // Let what is under way end, stop the progress thread, and free what MPI holds, on all ranks together.
  // Waits for the other ranks for at most 10 s. Without all of them, or after an error, frees nothing.
  // Idempotent.
  void Stop();

 private:
  Progress::Options ProgressOptions();
  [[noreturn]] void EndWithoutUpdate(const Error& error) const;

  Telemetry telemetry_;
  const std::unique_ptr<Network> connection_;
  Network& network_;
  AllReduceRoute route_;
  std::unique_ptr<Progress> progress_;  // declared before its users, although ~Engine stops it first
  Agreement agreement_;
  Messenger messenger_;
  BlockingCalls calls_;
  named::NamedCalls named_calls_;
  DeviceSlot device_;  // before the memory that it gives out
  DeviceCalls device_calls_;
  DeviceMessenger device_messages_;
  GradientBuckets buckets_;
  Watchdog watchdog_;  // last: its thread asks progress_
};

// The engine of the default session, which TensorFlow's kernels use. Null without a session.
void SetDefaultEngine(std::shared_ptr<Engine> engine);
std::shared_ptr<Engine> DefaultEngine();

}  // namespace hvpipe
