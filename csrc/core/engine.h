// The engine: gradient buckets and blocking collectives of one process, over MPI and shared memory.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/bucket.h"
#include "collectives/control.h"
#include "device/device_side.h"
#include "core/event_log.h"
#include "collectives/message.h"
#include "collectives/mpi_transport.h"
#include "core/progress.h"
#include "collectives/shared_memory.h"
#include "collectives/table_rows.h"

namespace hvpipe {

struct EngineOptions {
  double timeout_s = 300;         // longest wait for a peer
  double shortest_nap_s = 50e-6;  // of the progress thread, when nothing moves
  double longest_nap_s = 1e-3;
  std::size_t segment_bytes = 60'000;   // the most that a message has; below the eager limit of MPI
  int messages_in_flight = 8;           // ring messages that this rank may have under way
  std::size_t slot_bytes = 256 * 1024;  // of the shared-memory lane
  bool shared_memory = true;            // off: ranks of one host use the ring as well
  int ranks_per_host = 0;               // > 0: pretend that every so many ranks are a host (for tests)
  bool trace = false;
};

// Where the gradients of a plan lie.
enum class Memory { kHost, kDevice };

class Engine {
 public:
  // Null error: it went well. `scale` = this rank's share of all samples, `total` = samples of all ranks.
  using StepBegun = std::function<void(const Error* error, double scale, double total)>;
  using Done = std::function<void(const Error* error)>;
  using Interrupt = std::function<void()>;

  // Collective over `world`, which is duplicated; MPI must allow calls from several threads.
  Engine(MPI_Comm world, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  int hosts() const { return hosts_; }
  const EngineOptions& options() const { return options_; }
  EventLog& log() { return log_; }
  const EventLog& log() const { return log_; }
  Counters counters() const { return counters_; }
  // How many callers stand and wait for a message, which count themselves, and how many messages of device
  // memory are under way.
  std::shared_ptr<std::atomic<int>> awaited() const { return awaited_; }

  // Makes the fused buffers of a set of buckets that are reduced together each step, in this order.
  // `signature` must be equal on all ranks; that is checked at every step. Not collective.
  int AddPlan(const std::string& name, std::uint64_t signature, std::vector<BucketLayout> buckets,
              Memory memory = Memory::kHost);
  // Gives the plan's buffers back, behind what the device still does with them. Nothing happens while any of
  // its buckets is announced, reduced or waiting to be collected, or after an error. Not collective.
  void RemovePlan(int plan);
  const BucketLayout& layout(int plan, int bucket) const;

  // Announces a step of `samples` samples. With `reduces`, this rank will submit every bucket of the plan
  // once. `begun` is called when all ranks have announced the same step.
  void BeginStep(int plan, std::int64_t step, double samples, bool reduces, StepBegun begun);

  // Whether buckets are announced that are not submitted yet: peers count on them.
  bool Announced() const;

  // Packs tensors times `scale` into the fused buffer of a bucket and lets its all-reduce start.
  void Submit(int plan, int bucket, const std::vector<const void*>& tensors, double scale);

  // Calls `done` when the bucket's sum is there (at once, if it is). Then Unpack or Take once. Where NCCL
  // stays inside hosts no sum is there before all buckets of the step were submitted.
  void Collect(int plan, int bucket, Done done);
  // Copies the sums out, cast to the gradients' type.
  void Unpack(int plan, int bucket, const std::vector<void*>& tensors);
  // Hands out the fused buffer itself, where it holds the tensors as they are; else null. Whoever still holds
  // it when the bucket is submitted again keeps it, and the bucket gets another.
  std::shared_ptr<AlignedBuffer> Take(int plan, int bucket);

  // Blocking, called by all ranks in the same order. `interrupt` runs some times a second and may throw.
  // AllReduce: out = scale * sum of in over ranks; in may be out.
  void AllReduce(const void* in, void* out, std::size_t count, DType dtype, double scale,
                 const std::string& what, const Interrupt& interrupt);
  void Broadcast(void* data, std::size_t bytes, int root, const std::string& what,
                 const Interrupt& interrupt);
  // `bytes` from each rank, in rank order.
  void AllGather(const void* in, void* out, std::size_t bytes, const std::string& what,
                 const Interrupt& interrupt);
  // Waits for all ranks; throws unless all came with the same `what`. The samples of all ranks, in order.
  std::vector<double> Agree(const std::string& what, double samples, const Interrupt& interrupt,
                            bool patient = false);

  // Between two ranks, without waiting; `done` is called from another thread. What is sent stays as it is
  // until then. Messages of one tag between two ranks keep their order; tags are from 0 to 32766.
  void Send(int peer, int tag, const void* data, std::size_t bytes, const std::string& what, Done done);
  std::shared_ptr<AlignedBuffer> Receive(int peer, int tag, std::size_t bytes, const std::string& what,
                                         Done done);
  // Ranks that reduce among themselves; called by these ranks alone, in the same order, and waits for them.
  int AddGroup(const std::vector<int>& ranks, const Interrupt& interrupt);
  // In place, without waiting: data = sum over the ranks of the group, which call it in the same order.
  void GroupAllReduce(int group, void* data, std::size_t count, DType dtype, const std::string& what,
                      Done done);

  // Device memory; called by all ranks before any of the calls below. How data will go, in words.
  std::string UseDevice(const DeviceOptions& options, const Interrupt& interrupt);
  // As above, for a plan or arrays in device memory. `stream` is the one that the arrays are made and used
  // on: what reads and writes them is enqueued there, and the host waits for none of it. The blocking calls
  // return when the sum is there.
  void SubmitDevice(int plan, int bucket, const std::vector<const void*>& tensors, double scale,
                    Device::Stream stream);
  void UnpackDevice(int plan, int bucket, const std::vector<void*>& tensors, Device::Stream stream);
  void AllReduceDevice(const void* in, void* out, std::size_t count, DType dtype, double scale,
                       const std::string& what, Device::Stream stream, const Interrupt& interrupt);
  void BroadcastDevice(void* data, std::size_t bytes, int root, const std::string& what,
                       Device::Stream stream, const Interrupt& interrupt);

  // As Send and Receive, of device memory: it is read and written behind what is on `stream`, and what was
  // received is there for all streams when `done` is called. Where NCCL joins all ranks, the other end has
  // device memory as well.
  void SendDevice(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
                  Device::Stream stream, Done done);
  void ReceiveDevice(int peer, int tag, void* out, std::size_t bytes, const std::string& what,
                     Device::Stream stream, Done done);
  // The same in two parts, for arrays that come later than their message; returns the number that the second
  // is given. PostSend, then SendPosted, where `held` is what holds the data. PostReceive, into memory of the
  // engine's own, then, behind `done`, TakePosted.
  std::int64_t PostSend(int peer, int tag, const std::string& what, Done done);
  void SendPosted(std::int64_t number, const void* data, std::size_t bytes, Device::Stream stream,
                  std::shared_ptr<const void> held);
  std::int64_t PostReceive(int peer, int tag, std::size_t bytes, const std::string& what, Done done);
  void TakePosted(std::int64_t number, void* out, std::size_t count, DType dtype, Device::Stream stream);

  // Ends all that is under way with an error, and everything later.
  void Fail(const Error& error) { progress_->Fail(error); }
  // Lets what is under way end, stops the progress thread and frees what MPI holds, on all ranks together;
  // waits some seconds at most, and without them all, or after an error, frees nothing. Idempotent.
  void Stop();

 private:
  enum class BucketState { kIdle, kReducing, kReduced };
  // Where an all-reduce reads and writes; read when a stage begins, so it may be set as late as that.
  struct Ends {
    const void* in;
    void* out;
    std::size_t count;
  };
  struct Bucket {
    explicit Bucket(BucketLayout bucket_layout) : layout(std::move(bucket_layout)) {}
    void NewBuffer();
    void Pack(const std::vector<const void*>& tensors, double scale);
    void Unpack(const std::vector<void*>& tensors) const;
    BucketLayout layout;
    std::shared_ptr<AlignedBuffer> buffer;  // in host memory
    std::unique_ptr<DeviceBuffer> device;   // or this
    std::unique_ptr<TableRows> table;       // or here
    bool unpacked = false;                  // from device memory, at least once
    // The first arrays that were packed and unpacked lie on this device: those of later steps will.
    bool packs_here = false, unpacks_here = false;
    BucketState state = BucketState::kIdle;
    std::shared_ptr<Operation> operation;  // announced, waiting for Submit
    std::shared_ptr<Operation> gather;     // to be announced behind it, where NCCL stays inside hosts
    std::shared_ptr<Ends> ends;            // of that operation
    Done waiting;                          // of a Collect that came before the sum
    double asked_s = 0;
    int tag = 0;
  };
  struct Plan {
    std::string name;
    std::uint64_t signature;
    std::vector<std::unique_ptr<Bucket>> buckets;
  };

  // An all-reduce of device memory, that may begin behind one event and is over at the other.
  struct DeviceReduce {
    const void* in;
    void* out;
    void* host;  // room on the host, where there is no NCCL
    std::size_t count;
    DType dtype;
    Device::Event begun, ended;
    int tag;
    DeviceBuffer* buffer = nullptr;  // where it is a bucket's
  };

  // This rank's place in an NCCL communicator, and the rank that makes its address.
  struct NcclPlace {
    int rank, size;
    int first;
  };
  // Enqueues something on the stream of all communication.
  using DeviceCall = std::function<void(DeviceSide& side, Device::Stream stream)>;

  struct Group {
    std::unique_ptr<MpiTransport> transport;
    int calls = 0;
  };

  // One end of a message of device memory.
  struct DeviceMessage;
  // What was posted and waits for its second part.
  struct Posted {
    int peer, tag;
    std::string what;
    Done done;
    std::shared_ptr<void> room;  // of a receive
    std::size_t bytes;
  };

  Plan& PlanAt(int plan) const;  // with mutex_ held
  std::shared_ptr<Operation> Removal(std::shared_ptr<Plan> plan);
  Bucket& bucket(int plan, int index) const;
  void BeginPass(double now_s);
  double NapS(int idle_passes) const;
  void CheckPeersAreHere(const std::string& what);
  std::shared_ptr<Operation> BucketOperation(Bucket& bucket);
  static std::shared_ptr<Operation> EmptyOperation(const BucketLayout& layout);
  std::shared_ptr<Operation> Claim(Bucket& bucket);
  void BucketReduced(Bucket& bucket, const Error* error);
  std::unique_ptr<Collective> LaneSum(const std::string& what, std::uint64_t sequence, const Ends& ends,
                                      DType dtype, double scale, LaneReduce::Result result);
  void AddReduceStages(Operation& operation, std::shared_ptr<const Ends> ends, DType dtype, double scale,
                       int tag);
  void AddTableStages(Operation& operation, const Bucket& bucket);
  std::unique_ptr<Collective> Ring(Transport& ranks, void* data, std::size_t count, DType dtype, int tag);
  void AddControlStage(Operation& operation, double samples, std::uint64_t signature);
  static std::shared_ptr<Operation> Blocking(const std::string& what);
  std::shared_ptr<Operation> Checked(const std::string& what);
  void RunChecked(const std::string& what, std::function<std::unique_ptr<Collective>(const Operation&)> make,
                  const Interrupt& interrupt);
  int NextTag();
  static std::shared_ptr<Operation> MessageOperation(const char* category, const std::string& what,
                                                     Done done);
  void StartMessage(const char* category, const std::string& what,
                    std::function<std::unique_ptr<Collective>()> make, OrderQueue* order, Done done);
  void Meet(const std::vector<int>& ranks, const Interrupt& interrupt);
  OrderQueue* MessageOrder(bool sent, const MessageOptions& options);
  MessageOptions MessageTo(int peer, int tag) const;

  DeviceSide& device() const;
  bool HaveOwnBoards(const Device& device, const Interrupt& interrupt);
  void JoinNccl(DeviceSide& side, const DeviceOptions& options, const Interrupt& interrupt);
  void JoinHosts(DeviceSide& side, const std::vector<int>& rail, const Interrupt& interrupt);
  void AgreeOnNcclMemory(DeviceSide& side, const Interrupt& interrupt);
  void JoinRanks(DeviceSide& side, const NcclPlace& place, const Interrupt& interrupt);
  std::uint64_t DeviceSignature() const;
  void CheckRoom(const std::vector<BucketLayout>& buckets) const;
  DeviceBuffer& DeviceBufferOf(const Bucket& bucket) const;
  void AddDeviceReduce(Operation& operation, const DeviceReduce& reduce);
  void AddScatter(Operation& operation, const DeviceReduce& reduce);
  void AddGather(Operation& operation, const DeviceReduce& reduce);
  void AddNcclStages(Operation& operation, Device::Event begun, Device::Event ended, DeviceCall call,
                     DeviceCall then = nullptr);
  void AddCopy(Operation& operation, Device::Event begun, Device::Event ended, DeviceCall copy);
  void AddArrival(Operation& operation, Device::Event event);
  void AddArrival(Operation& operation, Device::Event event, NcclCommunicator* ranks);
  void CheckIsHere(const void* array, std::size_t count);
  bool TakeDevice(DeviceChannel& channel, DeviceMessage& message);
  bool LaunchMessage(DeviceChannel& channel, DeviceMessage& message);
  void AddCrossing(Operation& operation, const std::shared_ptr<DeviceMessage>& message);
  void AddMessageCopy(Operation& operation, const std::shared_ptr<DeviceMessage>& message,
                      Device::Stream stream, std::function<void(Device& device)> copy);
  void EnqueueMessage(const std::string& what, Done done,
                      const std::function<void(Operation& operation)>& add_stages);
  void ReceiveBehind(const std::shared_ptr<DeviceMessage>& message, void* out, const std::string& what,
                     Done done);
  std::optional<Posted> Forget(std::int64_t number);
  Posted TakeNumber(std::int64_t number, bool receives);
  void EndPosted(const Error& error);
  void AbortDevice();
  bool NcclHasAborted(double patience_s) const;
  bool LeaveNccl(double patience_s);
  bool AllLeave(double patience_s) const;

  EngineOptions options_;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1, hosts_ = 1;
  int host_ = 0;  // the first rank on this one's host
  bool single_ranked_hosts_ = true;
  Counters counters_;
  EventLog log_;
  SendBudget budget_;
  std::unique_ptr<MpiTransport> world_;
  std::unique_ptr<MpiTransport> messages_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::unique_ptr<MpiTransport> leaders_;  // one rank of each host; null on the others
  std::unique_ptr<Lane> up_, down_;
  OrderQueue control_order_, lane_order_;
  std::map<std::tuple<bool, int, int>, OrderQueue> message_order_;  // by whether sent, peer and tag
  mutable std::mutex mutex_;
  std::unique_ptr<DeviceSide> device_;     // set once, before any device memory comes
  std::map<std::int64_t, Posted> posted_;  // whose rooms are the device's
  std::int64_t next_posted_ = 0;
  std::vector<std::unique_ptr<Plan>> plans_;  // null: removed
  int buckets_ = 0;
  std::atomic<int> blocking_calls_{0};
  const std::shared_ptr<std::atomic<int>> awaited_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<bool> stopped_{false};
  std::unique_ptr<Progress> progress_;
};

// The default session's engine, which TensorFlow's kernels use; null when there is none.
void SetDefaultEngine(std::shared_ptr<Engine> engine);
std::shared_ptr<Engine> DefaultEngine();

}  // namespace hvpipe
