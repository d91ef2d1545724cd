// Turns collectives into calls of another library.
#include "core/delegated_network.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "core/vector_loops.h"

namespace hvpipe {
namespace {

using named::Call;
using named::CallError;
using named::CallService;
using named::Kind;
using named::Problem;
using named::Response;
using named::Type;

// How a call has ended. Shared, because the call may outlive the collective after an error.
struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> ended{false};
  CallError error{Problem::kNone, ""};
};

// Submit `call`, and tell `outcome` when it ends.
void Start(CallService& service, Call call, const std::shared_ptr<Outcome>& outcome) {
  call.done = [outcome](const CallError* error, const Response* /*response*/) {
    const std::lock_guard<std::mutex> lock(outcome->mutex);
    if (error != nullptr) outcome->error = *error;
    outcome->ended = true;
    outcome->changed.notify_all();
  };
  service.Submit(std::move(call));
}

void CheckSuccess(const Outcome& outcome) {
  if (outcome.error.problem == Problem::kNone) return;
  const bool mismatch = outcome.error.problem == Problem::kMismatch;
  throw Error(outcome.error.message, mismatch ? ErrorKind::kMismatch : ErrorKind::kPeer);
}

// A call that starts at the first step.
class DelegatedCall : public Collective {
 public:
  DelegatedCall(CallService& service, Call call) : service_(service), call_(std::move(call)) {
    what_ = call_.request.Described() + " named " + call_.request.name;
  }

  bool Step() override {
    if (!outcome_) {
      outcome_ = std::make_shared<Outcome>();
      Start(service_, std::move(call_), outcome_);
      return true;
    }
    if (!outcome_->ended || done_) return false;
    CheckSuccess(*outcome_);
    return done_ = true;
  }
  bool done() const override { return done_; }
  std::string Waiting() const override { return "the other ranks in the " + what_; }

 private:
  CallService& service_;
  Call call_;
  std::string what_;
  std::shared_ptr<Outcome> outcome_;
  bool done_ = false;
};

// Records by the rank that they come from, gathered by one call.
class DelegatedExchange : public RecordExchange {
 public:
  using MakeGather = std::function<std::unique_ptr<Collective>(void* out)>;

  DelegatedExchange(const Topology& topology, const Record& mine, const MakeGather& make_gather)
      : RecordExchange(topology.rank, topology.size), records_(static_cast<std::size_t>(topology.size)) {
    records_[static_cast<std::size_t>(topology.rank)] = mine;
    gather_ = make_gather(records_.data());
  }

  bool Step() override { return gather_->Step(); }
  bool done() const override { return gather_->done(); }
  std::string Waiting() const override { return "the other ranks to say what they do next"; }
  const Record& of(int rank) const override { return records_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<Record> records_;
  std::unique_ptr<Collective> gather_;
};

Type TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Type::kFloat16;
    case DType::kBFloat16:
      return Type::kBFloat16;
    case DType::kFloat64:
      return Type::kFloat64;
    case DType::kInt8:
      return Type::kInt8;
    default:
      return Type::kFloat32;
  }
}

// A call of one tensor with one axis, whose result goes to `out`.
Call MakeCall(Kind kind, int set, std::string name, Type type, std::size_t count, const void* in, void* out) {
  Call call;
  call.request.kind = kind;
  call.request.set = set;
  call.request.name = std::move(name);
  call.request.tensors = {{type, {static_cast<std::int64_t>(count)}}};
  call.inputs = {in};
  call.allocate = [out](int, const named::Shape&) { return out; };
  return call;
}

std::string Numbered(const char* what, int number) {
  return std::string(what) + "." + std::to_string(number);
}

// The library may keep something for each name, so names come again. No pair of ranks has this many messages
// under way.
constexpr int kMessageNames = 1024;

std::string MessageName(int from, int to, int tag) {
  return Numbered(from < to ? "up" : "down", tag % kMessageNames);
}

}  // namespace

DelegatedNetwork::DelegatedNetwork(std::shared_ptr<CallService> service, const Topology& topology,
                                   const EngineOptions& options, Counters& counters)
    : Network(options, topology), service_(std::move(service)), counters_(counters) {}

std::unique_ptr<RecordExchange> DelegatedNetwork::MakeExchange(const Record& mine) {
  return std::make_unique<DelegatedExchange>(
      topology_, mine, [this](void* out) { return MakeAllGather(out, sizeof(Record), 0); });
}

std::unique_ptr<Collective> DelegatedNetwork::MakeAllGather(void* out, std::size_t bytes, int tag) {
  counters_.network_bytes_sent += bytes;
  const char* const mine = static_cast<char*>(out) + static_cast<std::size_t>(topology_.rank) * bytes;
  return std::make_unique<DelegatedCall>(
      *service_, MakeCall(Kind::kAllgather, 0, Numbered("gather", tag), Type::kUint8, bytes, mine, out));
}

std::unique_ptr<Collective> DelegatedNetwork::MakeBroadcast(void* data, std::size_t bytes, int root,
                                                            int tag) {
  counters_.network_bytes_sent += topology_.rank == root ? bytes : 0;
  Call call = MakeCall(Kind::kBroadcast, 0, Numbered("broadcast", tag), Type::kUint8, bytes, data, data);
  call.request.root = root;
  return std::make_unique<DelegatedCall>(*service_, std::move(call));
}

std::unique_ptr<Collective> DelegatedNetwork::MakeAllReduce(const ReduceBuffers& buffers, DType dtype,
                                                            int tag) {
  return Reduce(0, Numbered("reduce", tag), buffers, dtype);
}

// The name has the type: the flags of a table and its rows share a tag.
std::unique_ptr<Collective> DelegatedNetwork::Reduce(int set, const std::string& name,
                                                     const ReduceBuffers& buffers, DType dtype) {
  counters_.network_bytes_sent += buffers.count * SizeOf(dtype);
  const Type type = TypeOf(dtype);
  return std::make_unique<DelegatedCall>(*service_, MakeCall(Kind::kAllreduce, set, name + "." + NameOf(type),
                                                             type, buffers.count, buffers.in, buffers.out));
}

int DelegatedNetwork::SetOf(const std::vector<int>& ranks) const {
  for (const int set : service_->Sets()) {
    if (service_->RanksOf(set) == ranks) return set;
  }
  std::string named;
  for (const int rank : ranks) named += (named.empty() ? "" : ", ") + std::to_string(rank);
  throw Error(
      "Messages and groups should be prepared before: all ranks call World.connect. Received: ranks " + named,
      ErrorKind::kUsage);
}

std::unique_ptr<Collective> DelegatedNetwork::MakeSend(const void* data, std::size_t bytes,
                                                       const MessageOptions& options) {
  counters_.network_bytes_sent += bytes;
  const int me = topology_.rank, peer = options.peer;
  // A broadcast changes nothing on its root.
  auto* const same = const_cast<void*>(data);
  Call call = MakeCall(Kind::kBroadcast, SetOf({std::min(me, peer), std::max(me, peer)}),
                       MessageName(me, peer, options.tag), Type::kUint8, bytes, data, same);
  call.request.root = me;
  return std::make_unique<DelegatedCall>(*service_, std::move(call));
}

std::unique_ptr<Collective> DelegatedNetwork::MakeReceive(void* data, std::size_t bytes,
                                                          const MessageOptions& options) {
  const int me = topology_.rank, peer = options.peer;
  Call call = MakeCall(Kind::kBroadcast, SetOf({std::min(me, peer), std::max(me, peer)}),
                       MessageName(peer, me, options.tag), Type::kUint8, bytes, data, data);
  call.request.root = peer;
  return std::make_unique<DelegatedCall>(*service_, std::move(call));
}

int DelegatedNetwork::AddGroup(const std::vector<int>& ranks) { return SetOf(ranks); }

std::unique_ptr<Collective> DelegatedNetwork::MakeGroupAllReduce(int group, int call, void* data,
                                                                 std::size_t count, DType dtype) {
  return Reduce(group, Numbered("group", call % kMessageNames), {data, data, count}, dtype);
}

bool DelegatedNetwork::Barrier(double patience_s) {
  const auto outcome = std::make_shared<Outcome>();
  Call call;
  call.request.kind = Kind::kBarrier;
  call.request.name = "end";
  Start(*service_, std::move(call), outcome);
  std::unique_lock<std::mutex> lock(outcome->mutex);
  const auto patience = std::chrono::duration<double>(patience_s);
  if (!outcome->changed.wait_for(lock, patience, [&] { return outcome->ended.load(); })) return false;
  return outcome->error.problem == Problem::kNone;
}

void DelegatedRoute::AddStages(Operation& operation, std::shared_ptr<const ReduceBuffers> buffers,
                               DType dtype, double scale, int tag) {
  operation.AddStage([=](const Operation&) { return network_.MakeAllReduce(*buffers, dtype, tag); });
  if (scale == 1.0) return;
  auto previous = std::move(operation.check);
  operation.check = [=](Operation& done) {
    if (previous) previous(done);
    Scale(buffers->out, dtype, buffers->count, scale);
  };
}

}  // namespace hvpipe
