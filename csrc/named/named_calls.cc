// The service thread: tells rank 0 about calls, and runs what it answers.
#include "named/named_calls.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "core/engine.h"
#include "core/event_log.h"
#include "core/exit_timer.h"
#include "core/shared_slot.h"
#include "named/call_check.h"

namespace hvpipe::named {
namespace {

constexpr int kRequestTag = 1;
constexpr int kResponseTag = 2;
// After something happened, look again at once for this long; then sleep, longer and longer.
constexpr double kEagerS = 200e-6;
constexpr double kShortestNapS = 20e-6;
constexpr double kLongestNapS = 500e-6;
constexpr double kSlowestBytesPerS = 1e6;  // of a collective that MPI runs
constexpr double kGraceS = 10;             // for rank 0, which ends calls that wait too long
constexpr double kLookS = 0.1;             // between two looks for long waits
constexpr double kIdleNapS = 2e-3;         // rank 0, if no call is under way anywhere

// All bytes that a collective moves between the ranks, of which this rank may have none.
double BytesOf(const Response& response, const Call* call, int ranks) {
  if (call == nullptr && response.example.empty()) return 0;
  const Request& request = response.example.empty() ? call->request : response.example.front();
  double bytes = 0;
  for (const TensorSpec& tensor : request.tensors) bytes += static_cast<double>(tensor.bytes());
  bytes *= ranks;
  const bool ragged = response.kind == Kind::kAllgather || response.kind == Kind::kAlltoall;
  if (!ragged || request.tensors.empty()) return bytes;
  double received = 0;  // by this rank; in an allgather that is all
  const std::size_t rows_of_each = response.extents.size() / request.tensors.size();
  for (std::size_t i = 0; i < response.extents.size(); ++i) {
    const TensorSpec& tensor = request.tensors[i / std::max<std::size_t>(rows_of_each, 1)];
    received += static_cast<double>(tensor.BytesOfRows(response.extents[i]));
  }
  return std::max(bytes, response.kind == Kind::kAllgather ? received : received * ranks);
}

std::vector<int> UpTo(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

NamedCalls::NamedCalls(std::unique_ptr<Links> links, double timeout_s)
    : rank_(links ? links->rank() : 0),
      size_(links ? links->size() : 1),
      timeout_s_(timeout_s),
      links_(std::move(links)) {
  const std::vector<int> everyone = UpTo(size_);
  sets_[0] = std::make_shared<ProcessSet>(links_ ? links_->MakeSet(everyone) : nullptr, everyone, rank_);
  if (rank_ == 0) coordinator_.emplace(size_, timeout_s);
}

// After an error the links stay: freeing them is collective.
NamedCalls::~NamedCalls() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = abandoned_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void NamedCalls::Leave() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_) return;
    left_ = true;
    // Nobody on this rank waits for anything, so the others need not hear of it unless they do.
    Call call;
    call.request.kind = Kind::kLeave;
    inbox_.push_back(std::move(call));
    StartThread();
  }
  changed_.notify_all();
}

void NamedCalls::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (failed_ || !links_) return;
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  for (auto& [number, set] : sets_) set->Free();
  sets_.clear();
  links_->Free();
}

std::vector<int> NamedCalls::RanksOf(int set) const {
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  const auto found = sets_.find(set);
  return found == sets_.end() ? std::vector<int>{} : found->second->ranks();
}

int NamedCalls::SetOf(const std::vector<int>& ranks) const {
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  for (const auto& [number, set] : sets_) {
    if (set->ranks() == ranks) return number;
  }
  return -1;
}

void NamedCalls::WatchWith(const std::shared_ptr<Engine>& engine, double warn_s, const std::string& sign) {
  engine_ = engine;
  end_sign_ = sign;
  warn_s_ = warn_s;
  Watchdog::Others watched;
  watched.waits_now = [self = weak_from_this()]() -> std::optional<Stall> {
    const auto calls = self.lock();
    return calls ? calls->WaitsNow() : std::nullopt;
  };
  watched.lost = [self = weak_from_this()](const Error& error) {
    if (const auto calls = self.lock()) calls->LoseProcess(error);
  };
  watched.end_if_stuck = [self = weak_from_this()] {
    if (const auto calls = self.lock()) calls->EndIfStuck();
  };
  engine->watchdog().AlsoWatch(std::move(watched));
}

// The service thread ends all calls with it, unless MPI holds the thread: see EndIfStuck.
void NamedCalls::LoseProcess(const Error& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_ = error.what();
  }
  changed_.notify_all();
}

// A collective of MPI waits for ever for a rank that has called it and then stopped.
void NamedCalls::EndIfStuck() const {
  const std::lock_guard<std::mutex> lock(under_way_mutex_);
  if (in_mpi_since_s_ == 0 || Now() - in_mpi_since_s_ < in_mpi_limit_s_) return;
  EndProcess("\nhvpipe: rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " waited " +
                 std::to_string(std::lround(Now() - in_mpi_since_s_)) + " s inside MPI in " + in_mpi_ +
                 ": every rank should take part sooner (HVPIPE_TIMEOUT). Received: nothing from at least one "
                 "rank. Has it ended, or does it hang? This rank exits with code 1.\n",
             end_sign_);
}

Stall NamedCalls::StallOf(const UnderWay& under_way, double now_s) const {
  const Request& request = under_way.call.request;
  Stall stall;
  stall.what = request.Described() + " named " + request.name;
  stall.waiting = "the others to call it";
  stall.waited_s = now_s - under_way.since_s;
  if (request.set != 0) stall.ranks = RanksOf(request.set);
  return stall;
}

// The call that has waited longest. A rank that has joined waits as long as the others train.
std::optional<Stall> NamedCalls::WaitsNow() const {
  const std::lock_guard<std::mutex> lock(under_way_mutex_);
  const UnderWay* oldest = nullptr;
  for (const auto& [key, each] : under_way_) {
    if (each.call.request.kind == Kind::kJoin) continue;
    if (oldest == nullptr || each.since_s < oldest->since_s) oldest = &each;
  }
  return oldest == nullptr ? std::nullopt : std::make_optional(StallOf(*oldest, Now()));
}

// Rank 0 ends calls that wait too long. If it cannot, each rank does.
void NamedCalls::LookAtWaits(double now_s) {
  if (now_s - looked_s_ < kLookS) return;
  looked_s_ = now_s;
  if (links_) TakeLost(links_->Lost());
  for (const auto& [key, each] : under_way_) {
    const Request& request = each.call.request;
    const double waited_s = ClockOf(request.set) - each.clock_s;
    if (request.kind == Kind::kJoin || waited_s < timeout_s_ + kGraceS) continue;
    throw CallError{Problem::kDeadline,
                    "Rank 0 should answer " + request.Described() + " named " + request.name + " within " +
                        std::to_string(static_cast<int>(timeout_s_)) +
                        " s (HVPIPE_TIMEOUT). Received: no answer. Has it ended, or does it hang?"};
  }
  if (warn_s_ > 0) TellStall(now_s);
}

// A rank that has ended makes no more calls, as one that has left.
void NamedCalls::TakeLost(const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    if (!lost_ranks_.insert(rank).second) continue;
    if (coordinator_) {
      Request leaves;
      leaves.kind = Kind::kLeave;
      Coordinate(coordinator_->OnRequest(rank, leaves, Now()));
    }
  }
  if (!coordinator_ && lost_ranks_.count(0) > 0 && !under_way_.empty()) {
    throw CallError{Problem::kPeer,
                    "Rank 0 should begin collectives by name. Received: the end of its connection. Has that "
                    "rank ended, or its network?"};
  }
}

// One report covers all calls that wait too long.
void NamedCalls::TellStall(double now_s) {
  std::optional<Stall> longest;
  for (auto& [key, each] : under_way_) {
    if (each.told || each.call.request.kind == Kind::kJoin || now_s - each.since_s < warn_s_) continue;
    each.told = true;
    Stall stall = StallOf(each, now_s);
    if (longest && longest->waited_s >= stall.waited_s) continue;
    if (coordinator_) stall.waiting = Listed(coordinator_->Late(key.first, key.second)) + " to call it";
    longest = std::move(stall);
  }
  const auto engine = longest ? engine_.lock() : nullptr;
  if (engine) engine->watchdog().Report(*longest);
}

// Requires mutex_.
void NamedCalls::StartThread() {
  if (started_) return;
  thread_ = std::thread([this] { Loop(); });
  started_ = true;
}

void NamedCalls::Submit(Call call) {
  try {
    call.request.refused = Check(call.request, RanksOf(call.request.set), rank_);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) throw *failed_;
    if (left_ || stop_) throw CallError{Problem::kUsage, "hvpipe has been shut down. Call init() again."};
    StartThread();  // first: it may throw, and then the caller reports the call
    inbox_.push_back(std::move(call));
  } catch (const CallError& error) {
    call.done(&error, nullptr);
    return;
  }
  changed_.notify_all();
}

Response NamedCalls::Run(Call call, const std::function<void()>& interrupt) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::optional<CallError> error;
    Response response;
  };
  const auto outcome = std::make_shared<Outcome>();
  call.done = [outcome](const CallError* error, const Response* response) {
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

void NamedCalls::Loop() {
  try {
    for (;;) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (abandoned_) return;
      }
      bool moved = TakeInbox() | Receive();
      // A request that waits to be received may complete a call.
      if (!moved) moved = Expire();
      const bool sent = !links_ || links_->Sent();
      if (moved) {
        active_s_ = Now();
        continue;
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        // Rank 0 serves the others until all have left.
        if (stop_ && sent && (!coordinator_ || !left_ || coordinator_->all_left())) return;
      }
      Rest(!sent);
    }
  } catch (const CallError& error) {
    FailAll(error);
  } catch (const Error& error) {
    FailAll({error.kind() == ErrorKind::kDeadline ? Problem::kDeadline : Problem::kPeer, error.what()});
  } catch (const std::exception& error) {
    FailAll({Problem::kPeer, error.what()});
  }
}

bool NamedCalls::TakeInbox() {
  std::vector<Call> taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!lost_.empty()) throw Error(lost_, ErrorKind::kPeer);
    taken.swap(inbox_);
  }
  for (auto call = taken.begin(); call != taken.end(); ++call) {
    try {
      Take(std::move(*call));
    } catch (...) {  // FailAll tells the rest
      const std::lock_guard<std::mutex> lock(mutex_);
      inbox_.insert(inbox_.begin(), std::make_move_iterator(std::next(call)),
                    std::make_move_iterator(taken.end()));
      throw;
    }
  }
  return !taken.empty();
}

void NamedCalls::Take(Call call) {
  const Request request = call.request;
  if (request.kind != Kind::kLeave) {
    const Key key{request.set, request.name};
    if (under_way_.count(key) > 0) {
      const CallError error{Problem::kUsage,
                            "A name should be in use once at a time: wait for the first call, or give "
                            "another name. Received: " +
                                request.Described() + " named " + request.name + " on rank " +
                                std::to_string(rank_)};
      call.done(&error, nullptr);
      return;
    }
    const std::lock_guard<std::mutex> lock(under_way_mutex_);
    under_way_.emplace(key, UnderWay{std::move(call), Now(), ClockOf(request.set)});
  }
  if (coordinator_) {
    Coordinate(coordinator_->OnRequest(rank_, request, ClockOf(request.set)));
  } else {
    links_->Send(0, Encoded(request), kRequestTag);
  }
}

// Seconds by which calls on a process set expire. It stands still in collectives that keep all its ranks:
// those of this set, and of all ranks.
double NamedCalls::ClockOf(int set) const {
  const auto spent_s = [this](int of) {
    const auto found = collectives_s_.find(of);
    return found == collectives_s_.end() ? 0.0 : found->second;
  };
  return Now() - spent_s(0) - (set == 0 ? 0.0 : spent_s(set));
}

bool NamedCalls::Receive() {
  if (!links_) return false;
  const auto message = links_->Receive(coordinator_ ? kRequestTag : kResponseTag);
  if (!message) return false;
  if (coordinator_) {
    Request request = DecodedRequest(message->second);
    const double clock_s = ClockOf(request.set);
    Coordinate(coordinator_->OnRequest(message->first, std::move(request), clock_s));
  } else {
    Handle(DecodedResponse(message->second));
  }
  return true;
}

bool NamedCalls::Expire() {
  if (!coordinator_ || coordinator_->idle()) return false;
  auto expired = coordinator_->Expired([this](int set) { return ClockOf(set); });
  if (expired.empty()) return false;
  Coordinate(std::move(expired));
  return true;
}

// Wait for a call of this rank, or for a message.
void NamedCalls::Rest(bool sends) {
  const bool awaits_message = !under_way_.empty() || sends || (coordinator_ && !coordinator_->idle());
  const double now_s = Now(), idle_s = now_s - active_s_;
  LookAtWaits(now_s);
  if (awaits_message && idle_s < kEagerS) {
    std::this_thread::yield();
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto woken = [&] { return !inbox_.empty() || (stop_ && !coordinator_); };
  if (!awaits_message && !(coordinator_ && size_ > 1)) {
    changed_.wait(lock, [&] { return woken() || stop_; });
    return;
  }
  const double nap_s = awaits_message ? std::clamp(idle_s / 8, kShortestNapS, kLongestNapS)
                       : stop_        ? kLongestNapS
                                      : kIdleNapS;
  changed_.wait_for(lock, std::chrono::duration<double>(nap_s), woken);
}

// Tell the others first, so that they begin together with this rank.
void NamedCalls::Coordinate(std::vector<Coordinator::Outgoing> responses) {
  for (const auto& [rank, response] : responses) {
    if (rank != rank_) links_->Send(rank, Encoded(response), kResponseTag);
  }
  for (const auto& [rank, response] : responses) {
    if (rank == rank_) Handle(response);
  }
}

void NamedCalls::Handle(const Response& response) {
  const Key key{response.set, response.name};
  const auto found = under_way_.find(key);
  Call* const call = found == under_way_.end() ? nullptr : &found->second.call;
  if (response.problem != Problem::kNone) {
    const CallError error{response.problem, response.message};
    return End(key, &error, nullptr);
  }
  const int ranks = static_cast<int>(RanksOf(response.set).size());
  try {
    const InMpi now(*this, response, call, ranks);
    RunCollective(response, call);
  } catch (const CallError& error) {  // no memory for an output
    End(key, &error, nullptr);
    if (ranks == 1) return;
    throw Error("Every rank should have memory for the result of " + response.name +
                    ", and the others wait for this one. Received: " + error.message,
                ErrorKind::kPeer);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUsage) throw;
    const CallError refused{Problem::kUsage, error.what()};  // on all ranks alike, before MPI was called
    return End(key, &refused, nullptr);
  }
  End(key, nullptr, &response);
}

NamedCalls::InMpi::InMpi(NamedCalls& calls, const Response& response, const Call* call, int ranks)
    : calls_(calls), set_(response.set) {
  const double bytes = BytesOf(response, call, ranks);
  const std::lock_guard<std::mutex> lock(calls_.under_way_mutex_);
  calls_.in_mpi_ = response.name;
  calls_.in_mpi_since_s_ = Now();
  calls_.in_mpi_limit_s_ = calls_.timeout_s_ + kGraceS + bytes / kSlowestBytesPerS;
}

NamedCalls::InMpi::~InMpi() {
  const std::lock_guard<std::mutex> lock(calls_.under_way_mutex_);
  calls_.collectives_s_[set_] += Now() - calls_.in_mpi_since_s_;
  calls_.in_mpi_since_s_ = 0;
}

void NamedCalls::RunCollective(const Response& response, Call* call) {
  std::shared_ptr<ProcessSet> set;
  {
    const std::lock_guard<std::mutex> lock(sets_mutex_);
    set = sets_.at(response.set);
  }
  if (call == nullptr || !response.example.empty()) {
    if (!response.example.empty() && response.kind == Kind::kAllreduce)
      set->AllreduceZeros(response.example[0]);
    return;
  }
  switch (response.kind) {
    case Kind::kAllreduce:
      return set->Allreduce(*call);
    case Kind::kAllgather:
      return set->Allgather(*call, response.extents);
    case Kind::kBroadcast:
      return set->Broadcast(*call);
    case Kind::kAlltoall:
      return set->Alltoall(*call, response.extents);
    case Kind::kReducescatter:
      return set->Reducescatter(*call);
    case Kind::kAddSet: {
      const std::vector<int> ranks(response.extents.begin(), response.extents.end());
      auto links = links_ ? links_->MakeSet(ranks) : nullptr;
      const std::lock_guard<std::mutex> lock(sets_mutex_);
      sets_[response.number] = std::make_shared<ProcessSet>(std::move(links), ranks, rank_);
      return;
    }
    case Kind::kRemoveSet: {
      std::shared_ptr<ProcessSet> removed;
      {
        const std::lock_guard<std::mutex> lock(sets_mutex_);
        if (const auto found = sets_.find(response.number); found != sets_.end()) {
          removed = std::move(found->second);
          sets_.erase(found);
        }
      }
      if (removed) removed->Free();  // without the lock: MPI may wait for the other ranks
      return;
    }
    case Kind::kBarrier:
    case Kind::kJoin:
    case Kind::kLeave:
      return;
  }
}

void NamedCalls::End(const Key& key, const CallError* error, const Response* response) {
  const auto found = under_way_.find(key);
  // A rank that has joined takes part in calls that it did not make. Its own call of this name may be a join.
  if (found == under_way_.end() || (response != nullptr && found->second.call.request.kind != response->kind))
    return;
  std::map<Key, UnderWay>::node_type ended;  // whole until then, because the watchdog may look at it
  {
    const std::lock_guard<std::mutex> lock(under_way_mutex_);
    ended = under_way_.extract(found);  // before `done`, which may make the next call of this name
  }
  ended.mapped().call.done(error, response);
}

void NamedCalls::FailAll(const CallError& error) {
  std::vector<Call> inbox;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = error;
    inbox.swap(inbox_);
  }
  std::map<Key, UnderWay> under_way;
  {
    const std::lock_guard<std::mutex> lock(under_way_mutex_);
    under_way.swap(under_way_);
  }
  for (auto& [key, each] : under_way) each.call.done(&error, nullptr);
  for (const Call& call : inbox) {
    if (call.request.kind != Kind::kLeave) call.done(&error, nullptr);
  }
}

namespace {

SharedSlot<NamedCalls> default_slot;

}  // namespace

void SetDefaultCalls(std::shared_ptr<NamedCalls> calls) { default_slot.Set(std::move(calls)); }

std::shared_ptr<NamedCalls> DefaultCalls() { return default_slot.Get(); }

}  // namespace hvpipe::named
