// Tells rank 0 about calls, and turns its answers into exchanges.
#include "named/named_calls.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <numeric>

#include "base/shared_slot.h"
#include "collectives/tags.h"
#include "named/call_check.h"

namespace hvpipe::named {
namespace {

enum Message : int { kRequest = 1, kResponse };

constexpr double kGraceS = 10;   // for rank 0, which ends calls that wait too long
constexpr double kLookS = 0.1;   // between two looks for lost ranks
constexpr double kStoppedS = 2;  // after this time without a look, the process had been stopped

// How many tags a call takes for itself. The broadcasts of its tensors are under way at the same time.
int TagsOf(const Request& request) {
  switch (request.kind) {
    case Kind::kBroadcast:
      return static_cast<int>(request.tensors.size());
    case Kind::kAllreduce:
    case Kind::kAllgather:
    case Kind::kAlltoall:
    case Kind::kReducescatter:
      return 1;
    default:
      return 0;
  }
}

std::vector<int> UpTo(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

// A call of this rank that waits for the answer of rank 0.
struct NamedCalls::Pending {
  Call call;
  Operation* operation = nullptr;
  std::optional<Response> response;
  double clock_s = 0;          // ClockOf its process set when it began
  std::optional<Error> error;  // of this call alone
};

// The first stage of a call.
class NamedCalls::Answer : public Collective {
 public:
  Answer(const NamedCalls& calls, std::shared_ptr<const Pending> pending)
      : calls_(calls), pending_(std::move(pending)) {}
  bool Step() override { return done(); }
  bool done() const override { return pending_->response.has_value(); }
  std::string Waiting() const override {
    return calls_.WaitsFor({pending_->call.request.set, pending_->call.request.name});
  }
  std::vector<int> Ranks() const override {
    const int set = pending_->call.request.set;
    return set == 0 ? std::vector<int>{} : calls_.RanksOf(set);
  }
  // Rank 0 ends calls that wait too long. If it does not, CheckAnswers does.
  double GraceS() const override { return std::numeric_limits<double>::infinity(); }

 private:
  const NamedCalls& calls_;
  const std::shared_ptr<const Pending> pending_;
};

NamedCalls::NamedCalls() : coordinator_(std::in_place, 1, 0.0) { sets_[0] = {{0}, 0, nullptr, nullptr}; }

NamedCalls::NamedCalls(Progress& progress, Network& network, Messenger& messenger)
    : progress_(&progress),
      network_(&network),
      messenger_(&messenger),
      rank_(network.topology().rank),
      size_(network.topology().size),
      timeout_s_(network.options().timeout_s) {
  sets_[0] = {UpTo(size_), rank_, size_ > 1 ? &network.named() : nullptr, network.named_window()};
  if (rank_ == 0) coordinator_.emplace(size_, timeout_s_);
}

std::vector<int> NamedCalls::RanksOf(int set) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(set);
  return found == sets_.end() ? std::vector<int>{} : found->second.ranks;
}

int NamedCalls::SetOf(const std::vector<int>& ranks) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, members] : sets_) {
    if (members.ranks == ranks) return number;
  }
  return -1;
}

void NamedCalls::Submit(Call call) {
  const Request& request = call.request;
  const Key key{request.set, request.name};
  bool only = false;
  try {
    call.request.refused = Check(call.request, RanksOf(request.set), rank_);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_) throw Error("hvpipe has been shut down. Call init() again.", ErrorKind::kUsage);
    if (!in_use_.insert(key).second) {
      throw Error(
          "A name should be in use once at a time: wait for the first call, or give another name. "
          "Received: " +
              request.Described() + " named " + request.name + " on rank " + std::to_string(rank_),
          ErrorKind::kUsage);
    }
    only = in_use_.size() == 1;
  } catch (const Error& error) {
    return call.done(&error, nullptr);
  }
  if (progress_ == nullptr) return RunAlone(call);
  const auto pending = std::make_shared<Pending>();
  const auto operation = Messenger::MakeOperation(
      nullptr, request.Described() + " named " + request.name, [this, pending, key](const Error* error) {
        if (error == nullptr && pending->error) error = &*pending->error;
        Ended(key, pending->call, error, error == nullptr ? &*pending->response : nullptr);
      });
  // A rank that has joined waits as long as the others train.
  if (request.kind == Kind::kJoin) operation->limit_s = std::numeric_limits<double>::infinity();
  pending->operation = operation.get();
  pending->call = std::move(call);
  operation->AddStage([this, pending, key](const Operation&) {
    pending->clock_s = ClockOf(key.first);
    pending_[key] = pending;
    Announce(pending->call.request);
    return std::make_unique<Answer>(*this, pending);
  });
  try {
    progress_->Begin(operation, only ? network_->crowded() ? kOnCallerCrowdedS : kOnCallerS : 0);
  } catch (const Error& error) {
    Ended(key, pending->call, &error, nullptr);
  }
}

// Free the name before `done`, which may make the next call of this name.
void NamedCalls::Ended(const Key& key, const Call& call, const Error* error, const Response* response) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use_.erase(key);
  }
  call.done(error, response);
}

// One rank has nobody to wait for.
void NamedCalls::RunAlone(Call& call) {
  const Key key{call.request.set, call.request.name};
  const auto agreed = std::make_shared<AgreedCall>();
  agreed->call = std::move(call);
  std::optional<Error> error;
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      agreed->response = coordinator_->OnRequest(0, agreed->call.request, 0).back().response;
      agreed->members = sets_.at(key.first);
    }
    const Response& response = agreed->response;
    if (!response.error.empty()) throw Error(response.error, response.error_kind);
    if (response.kind == Kind::kRemoveSet) RemoveSet(response.number);
    Operation operation;
    AddStages(operation, agreed, nullptr, nullptr);
    for (Operation::Stage& stage : operation.stages) (void)stage.make(operation)->Step();
  } catch (const std::exception& failure) {
    error = ErrorOf(failure);
  }
  Ended(key, agreed->call, error ? &*error : nullptr, error ? nullptr : &agreed->response);
}

Response NamedCalls::Run(Call call, const Interrupt& interrupt) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::optional<Error> error;
    Response response;
  };
  const auto outcome = std::make_shared<Outcome>();
  call.done = [outcome](const Error* error, const Response* response) {
    const std::lock_guard<std::mutex> lock(outcome->mutex);
    if (error != nullptr) outcome->error = *error;
    if (response != nullptr) outcome->response = *response;
    outcome->ended = true;
    outcome->changed.notify_all();
  };
  Submit(std::move(call));
  std::unique_lock<std::mutex> lock(outcome->mutex);
  while (!outcome->changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return outcome->ended; })) {
    lock.unlock();
    interrupt();
    lock.lock();
  }
  if (outcome->error) throw *outcome->error;
  return outcome->response;
}

// The members connect on the caller's thread: MPI may wait for them in that.
int NamedCalls::AddSet(const std::vector<std::int64_t>& ranks, const Interrupt& interrupt) {
  const Turns::Turn turn = adding_.Take(interrupt);  // MPI makes one group at a time
  Call call;
  call.request.kind = Kind::kAddSet;
  call.request.name = "add_process_set";
  call.request.splits = ranks;
  const Response response = Run(std::move(call), interrupt);
  Members members;
  members.ranks.assign(response.extents.begin(), response.extents.end());
  members.place = members.PlaceOf(rank_);
  if (members.place >= 0 && members.size() == size_ && size_ > 1) {
    members.transport = &network_->named();
    members.window = network_->named_window();
  } else if (members.place >= 0 && members.size() > 1) {
    std::optional<int> group;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = groups_.find(members.ranks); found != groups_.end()) group = found->second;
    }
    if (!group) group = messenger_->AddGroup(members.ranks, interrupt);
    members.transport = &network_->TransportOf(*group);
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_[members.ranks] = *group;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sets_[response.number] = std::move(members);
  return response.number;
}

void NamedCalls::RemoveSet(int set) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(set);
}

void NamedCalls::Leave() {
  if (left_.exchange(true) || progress_ == nullptr) return;
  const auto operation = Messenger::MakeOperation(nullptr, "leaving the collectives by name", nullptr);
  operation->AddStage([this](const Operation&) {
    Request leaves;
    leaves.kind = Kind::kLeave;
    Announce(leaves);
    return std::make_unique<ConcurrentCollectives>(std::vector<std::unique_ptr<Collective>>());
  });
  try {
    progress_->Enqueue({operation}, true);
  } catch (const Error&) {  // the engine has failed, and the others learn of that
  }
}

// --- On the driving thread --------------------------------------------------------------------------------

void NamedCalls::Announce(const Request& request) {
  started_ = true;
  active_s_ = now_s_;
  if (coordinator_) {
    Tell(coordinator_->OnRequest(rank_, request, ClockOf(request.set)));
  } else {
    network_->requests().Send(0, kRequest, Encoded(request));
  }
}

bool NamedCalls::Serve(double now_s) {
  // Before its first call, rank 0 looks seldom for calls of others.
  const bool looks = started_ || (coordinator_ && now_s - looked_s_ > kSeldomS);
  if (!looks || size_ == 1) {
    now_s_ = now_s;
    return false;
  }
  LetClocksRun(now_s);
  bool moved = false;
  for (auto held = std::exchange(early_, {}); !held.empty(); held.pop_front())
    Handle(std::move(held.front()));
  if (coordinator_ || !pending_.empty()) {
    while (auto message = network_->requests().Receive()) {
      moved = true;
      if (message->kind == kResponse) {
        Handle(DecodedResponse(message->text));
      } else {
        started_ = true;
        Request request = DecodedRequest(message->text);
        const double clock_s = ClockOf(request.set);
        Tell(coordinator_->OnRequest(message->rank, std::move(request), clock_s));
      }
    }
  }
  // A request that waits to be received may complete a call.
  if (coordinator_ && !moved && !coordinator_->idle()) {
    auto expired = coordinator_->Expired([this](int set) { return ClockOf(set); });
    moved = !expired.empty();
    Tell(std::move(expired));
  }
  if (now_s - looked_s_ > kLookS) {
    looked_s_ = now_s;
    TakeLost();
    CheckAnswers();
  }
  if (moved) active_s_ = now_s;
  return moved;
}

// Seconds by which calls on a process set expire. It stands still while exchanges of this set, or of all
// ranks, are under way: they may keep a rank from its next call. So it does while the process is stopped.
double NamedCalls::ClockOf(int set) const {
  const auto stopped_s = [this](int of) {
    const auto found = stopped_s_.find(of);
    return found == stopped_s_.end() ? 0.0 : found->second;
  };
  return now_s_ - stopped_all_s_ - stopped_s(0) - (set == 0 ? 0.0 : stopped_s(set));
}

void NamedCalls::LetClocksRun(double now_s) {
  const double passed_s = now_s_ > 0 ? now_s - now_s_ : 0;
  if (passed_s > kStoppedS && awaits()) {
    stopped_all_s_ += passed_s;
  } else {
    for (const auto& [set, calls] : exchanging_) stopped_s_[set] += passed_s;
  }
  now_s_ = now_s;
}

// Tell the others first, so that they begin together with this rank.
void NamedCalls::Tell(std::vector<Coordinator::Outgoing> responses) {
  for (const auto& [rank, response] : responses) {
    if (rank != rank_) network_->requests().Send(rank, kResponse, Encoded(response));
  }
  for (auto& [rank, response] : responses) {
    if (rank == rank_) Handle(std::move(response));
  }
}

void NamedCalls::Handle(Response response) {
  if (!early_.empty()) {  // answers keep their order, in which calls take tags and places in the window
    early_.push_back(std::move(response));
    return;
  }
  if (!response.example.empty()) return AddZeros(std::move(response));
  const auto found = pending_.find({response.set, response.name});
  if (found == pending_.end()) return;
  const std::shared_ptr<Pending> pending = std::move(found->second);
  pending_.erase(found);
  pending->response = std::move(response);
  const Response& answer = *pending->response;
  if (!answer.error.empty()) {
    pending->error = Error(answer.error, answer.error_kind);
    return;
  }
  if (answer.kind == Kind::kRemoveSet) return RemoveSet(answer.number);
  const auto agreed = std::make_shared<AgreedCall>();
  agreed->call = pending->call;
  agreed->response = answer;
  try {
    Begin(*pending->operation, agreed);
  } catch (const std::exception& failure) {  // no memory for an output
    const Error error = ErrorOf(failure);
    if (agreed->members.size() > 1)
      throw Error("Every rank should have memory for the result of " + answer.name +
                      ", and the others wait for this one. Received: " + error.what(),
                  ErrorKind::kPeer);
    pending->error = error;
  }
}

// This rank has joined, and takes part in a call of others.
void NamedCalls::AddZeros(Response response) {
  if (response.kind != Kind::kAllreduce) return;
  if (RanksOf(response.set).empty()) {  // another thread of this rank still makes the set
    early_.push_back(std::move(response));
    return;
  }
  const auto agreed = std::make_shared<AgreedCall>();
  const auto memory = std::make_shared<std::vector<std::unique_ptr<char[]>>>();
  const auto operation = Messenger::MakeOperation(
      nullptr, response.example.front().Described() + " named " + response.name + ", after join",
      [memory](const Error*) {});
  agreed->call = ZerosFor(response.example.front(), *memory);
  agreed->response = std::move(response);
  Begin(*operation, agreed);
  progress_->Enqueue({operation}, true);
}

void NamedCalls::Begin(Operation& operation, const std::shared_ptr<AgreedCall>& agreed) {
  const int set = agreed->response.set;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    agreed->members = sets_.at(set);
  }
  if (agreed->members.transport != nullptr) {
    // All members take the same numbers, because they get the answers of a set in one order. A rank that has
    // joined hears of all-reduces only.
    const int tags = TagsOf(agreed->call.request);
    int& next = next_tags_[agreed->members.transport];
    if (next > agreed->members.transport->most_tag() - tags) next = 0;
    agreed->tag = std::exchange(next, next + tags);
  }
  AddStages(operation, agreed, network_, &window_order_);
  operation.TakePlaces();
  ++exchanging_[set];
  active_s_ = now_s_;
  operation.check = [this, set](Operation&) {
    if (--exchanging_[set] == 0) exchanging_.erase(set);
  };
}

// A rank that has ended makes no more calls, as one that has left.
void NamedCalls::TakeLost() {
  for (const int rank : network_->Lost()) {
    if (!lost_.insert(rank).second || !coordinator_) continue;
    Request leaves;
    leaves.kind = Kind::kLeave;
    Tell(coordinator_->OnRequest(rank, std::move(leaves), ClockOf(0)));
  }
  if (!coordinator_ && lost_.count(0) > 0 && !pending_.empty()) {
    throw Error(
        "Rank 0 should begin collectives by name. Received: the end of its connection. Has that rank "
        "ended, or its network?",
        ErrorKind::kPeer);
  }
}

void NamedCalls::CheckAnswers() const {
  for (const auto& [key, each] : pending_) {
    const Request& request = each->call.request;
    const double waited_s = ClockOf(request.set) - each->clock_s;
    if (request.kind == Kind::kJoin || waited_s < timeout_s_ + kGraceS) continue;
    throw Error("Rank 0 should answer " + request.Described() + " named " + request.name + " within " +
                    std::to_string(static_cast<int>(timeout_s_)) +
                    " s (HVPIPE_TIMEOUT). Received: no answer. Has it ended, or does it hang?",
                ErrorKind::kDeadline);
  }
}

std::string NamedCalls::WaitsFor(const Key& key) const {
  const std::vector<int> late = coordinator_ ? coordinator_->Late(key.first, key.second) : std::vector<int>{};
  return late.empty() ? "the others to call it" : Listed(late) + " to call it";
}

namespace {

SharedSlot<NamedCalls> default_slot;

}  // namespace

void SetDefaultCalls(std::shared_ptr<NamedCalls> calls) { default_slot.Set(std::move(calls)); }

std::shared_ptr<NamedCalls> DefaultCalls() { return default_slot.Get(); }

}  // namespace hvpipe::named
