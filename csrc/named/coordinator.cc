// Matches the calls of all ranks by process set and name, and compares them.
#include "named/coordinator.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace hvpipe::named {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 30;

// What must be equal on all ranks. Ragged calls may differ in the first axis.
std::string Signature(const Request& request) {
  Request compared = request;
  if (request.kind == Kind::kAllgather || request.kind == Kind::kAlltoall) {
    for (TensorSpec& tensor : compared.tensors) {
      if (!tensor.shape.empty()) tensor.shape.front() = -1;
    }
  }
  if (request.kind == Kind::kAlltoall) compared.splits.clear();
  return Encoded(compared);
}

}  // namespace

std::string Listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

Coordinator::Coordinator(int ranks, double timeout_s) : ranks_(ranks), timeout_s_(timeout_s) {
  std::vector<int> everyone(static_cast<std::size_t>(ranks));
  std::iota(everyone.begin(), everyone.end(), 0);
  sets_[0] = everyone;
}

const std::vector<int>& Coordinator::MembersOf(int set) const {
  static const std::vector<int> kNobody;
  const auto found = sets_.find(set);
  return found == sets_.end() ? kNobody : found->second;
}

std::vector<Coordinator::Outgoing> Coordinator::OnRequest(int rank, Request request, double now_s) {
  std::vector<Outgoing> out;
  if (request.kind == Kind::kLeave) {
    left_.insert(rank);
    joined_.erase(rank);
    FailWhatNeeds(rank, out);
    return out;
  }
  const bool joins = request.kind == Kind::kJoin;
  const Key key{request.set, request.name};
  Pending& pending = pending_[key];
  if (pending.requests.empty()) pending.since_s = now_s;
  pending.requests.emplace(rank, std::move(request));
  if (sets_.count(key.first) == 0) {
    FailRemoved(key.first, out);
    return out;
  }
  for (const int member : MembersOf(key.first)) {
    if (left_.count(member) == 0) continue;
    const Pending failed = std::move(pending);
    pending_.erase(key);
    Fail(key, failed, ErrorKind::kPeer, Missing(key, failed), out);
    return out;
  }
  if (joins) {
    joined_.insert(rank);
    last_joined_ = rank;
  }
  if (joined_.empty()) {
    if (Complete(key, pending)) Finish(key, pending, out);
  } else {
    FinishWhatIsComplete(out);
  }
  return out;
}

bool Coordinator::Complete(const Key& key, const Pending& pending) const {
  const std::vector<int>& members = MembersOf(key.first);
  const bool of_joined = pending.requests.begin()->second.kind == Kind::kJoin;
  return std::all_of(members.begin(), members.end(), [&](int member) {
    return pending.requests.count(member) > 0 || (!of_joined && Joined(member));
  });
}

// A rank that joins may complete any call.
void Coordinator::FinishWhatIsComplete(std::vector<Outgoing>& out) {
  for (auto at = pending_.begin(); at != pending_.end();) {
    const Key key = at->first;
    // The end of the join comes last: until then joined ranks still take part.
    if (at->second.requests.begin()->second.kind != Kind::kJoin && Complete(key, at->second)) {
      Finish(key, at->second, out);
    }
    at = pending_.upper_bound(key);  // the removal of a process set ends other calls
  }
  if (static_cast<int>(joined_.size()) < ranks_) return;
  for (auto at = pending_.begin(); at != pending_.end(); ++at) {
    if (at->second.requests.begin()->second.kind != Kind::kJoin) continue;
    const Key key = at->first;
    Finish(key, at->second, out);
    joined_.clear();
    return;
  }
}

// Removes the call.
void Coordinator::Finish(const Key& key, const Pending& pending, std::vector<Outgoing>& out) {
  const Pending complete = pending;
  pending_.erase(key);
  const std::string difference = Difference(complete);
  if (!difference.empty()) return Fail(key, complete, ErrorKind::kMismatch, difference, out);
  const std::string trouble = ProblemWithJoined(complete.requests.begin()->second, MembersOf(key.first));
  if (!trouble.empty()) return Fail(key, complete, ErrorKind::kMismatch, trouble, out);
  const std::string excess = TooManyRows(complete);
  if (!excess.empty()) return Fail(key, complete, ErrorKind::kUsage, excess, out);
  Answer(key, complete, out);
}

// Ranks learn the rows that they received as int32. Only some would notice that these are too many.
std::string Coordinator::TooManyRows(const Pending& pending) const {
  if (pending.requests.begin()->second.kind != Kind::kAlltoall) return "";
  std::map<int, std::int64_t> rows;  // sent by a rank; received at place p: under -1 - p
  for (const auto& [rank, request] : pending.requests) {
    for (std::size_t place = 0; place < request.splits.size(); ++place) {
      rows[rank] += request.splits[place];
      rows[-1 - static_cast<int>(place)] += request.splits[place];
    }
  }
  for (const auto& [of, count] : rows) {
    if (count <= kMostRows) continue;
    return "An alltoall should send and receive at most " + std::to_string(kMostRows) +
           " rows on each rank. Received: " + std::to_string(count);
  }
  return "";
}

std::string Coordinator::Difference(const Pending& pending) const {
  const auto& [first_rank, first] = *pending.requests.begin();
  const std::string what = std::string(NameOf(first.kind)) + " " + first.name;
  for (const auto& [rank, request] : pending.requests) {
    if (request.refused.empty()) continue;
    return what + ": rank " + std::to_string(rank) + " cannot take part: " + request.refused;
  }
  const std::string expected = Signature(first);
  for (const auto& [rank, request] : pending.requests) {
    if (Signature(request) == expected) continue;
    return what + ": all ranks should make the same call. Received: " + first.Described() + " on rank " +
           std::to_string(first_rank) + ", " + request.Described() + " on rank " + std::to_string(rank);
  }
  return "";
}

std::string Coordinator::ProblemWithJoined(const Request& request, const std::vector<int>& members) const {
  const bool sums =
      request.kind == Kind::kAllreduce && (request.op == ReduceOp::kSum || request.op == ReduceOp::kAverage);
  if (sums || request.kind == Kind::kBarrier || request.kind == Kind::kJoin) return "";
  for (const int member : members) {
    if (!Joined(member)) continue;
    return request.Described() + " named " + request.name +
           ": a rank that has joined can only take part in an allreduce by sum or " +
           "average, because it adds zeros. Received: rank " + std::to_string(member) + " has joined";
  }
  return "";
}

void Coordinator::Fail(const Key& key, const Pending& pending, ErrorKind kind, const std::string& error,
                       std::vector<Outgoing>& out) const {
  for (const auto& [rank, request] : pending.requests) {
    Response response;
    response.kind = request.kind;
    response.name = key.second;
    response.set = key.first;
    const bool own_fault = kind == ErrorKind::kMismatch && !request.refused.empty();
    response.error_kind = own_fault ? ErrorKind::kUsage : kind;
    response.error = own_fault ? request.refused : error;
    out.push_back({rank, std::move(response)});
  }
}

void Coordinator::Answer(const Key& key, const Pending& pending, std::vector<Outgoing>& out) {
  const Request& first = pending.requests.begin()->second;
  const std::vector<int>& members = MembersOf(key.first);
  Response response;
  response.kind = first.kind;
  response.name = key.second;
  response.set = key.first;
  if (first.kind == Kind::kJoin) response.number = last_joined_;
  if (first.kind == Kind::kAddSet) {
    const std::string trouble = AddSet(first, response);
    if (!trouble.empty()) return Fail(key, pending, ErrorKind::kUsage, trouble, out);
  }
  if (first.kind == Kind::kRemoveSet) {
    response.number = first.root;
    if (sets_.erase(first.root) == 0) response.number = -1;
    FailRemoved(first.root, out);
  }
  if (first.kind == Kind::kAllgather) {
    for (std::size_t tensor = 0; tensor < first.tensors.size(); ++tensor) {
      for (const int member : members) {
        response.extents.push_back(pending.requests.at(member).tensors[tensor].rows());
      }
    }
  }
  for (std::size_t place = 0; place < members.size(); ++place) {
    Response own = response;
    const int member = members[place];
    if (first.kind == Kind::kAlltoall) {
      for (const int sender : members) own.extents.push_back(pending.requests.at(sender).splits[place]);
    }
    if (pending.requests.count(member) == 0) own.example.push_back(first);  // it has joined
    out.push_back({member, std::move(own)});
  }
}

// Fail the calls on a process set that is gone.
void Coordinator::FailRemoved(int set, std::vector<Outgoing>& out) {
  for (auto at = pending_.lower_bound({set, ""}); at != pending_.end() && at->first.first == set;) {
    Fail(at->first, at->second, ErrorKind::kUsage,
         "A process set should exist while a call uses it. Received: " +
             at->second.requests.begin()->second.Described() + " named " + at->first.second +
             " on process set " + std::to_string(set) + ", which was removed",
         out);
    at = pending_.erase(at);
  }
}

std::string Coordinator::AddSet(const Request& request, Response& response) {
  std::vector<std::int64_t> ranks = request.splits;
  std::sort(ranks.begin(), ranks.end());
  const bool repeated = std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
  if (ranks.empty() || repeated || ranks.front() < 0 || ranks.back() >= ranks_) {
    return "A process set should be one or more different ranks, 0 to " + std::to_string(ranks_ - 1) +
           ". Received: " + request.Described();
  }
  const std::vector<int> added(ranks.begin(), ranks.end());
  for (const auto& [number, members] : sets_) {
    if (members != added) continue;
    return "A process set of these ranks exists. Received: " + request.Described() +
           ", which is process set " + std::to_string(number);
  }
  response.number = next_set_++;
  response.extents = ranks;
  sets_[response.number] = added;
  return "";
}

// Fail the calls that can no longer be completed.
void Coordinator::FailWhatNeeds(int rank, std::vector<Outgoing>& out) {
  for (auto at = pending_.begin(); at != pending_.end();) {
    const std::vector<int>& members = MembersOf(at->first.first);
    if (std::find(members.begin(), members.end(), rank) == members.end()) {
      ++at;
      continue;
    }
    Fail(at->first, at->second, ErrorKind::kPeer, Missing(at->first, at->second), out);
    for (const auto& [waiting, request] : at->second.requests) {
      if (request.kind == Kind::kJoin) joined_.erase(waiting);
    }
    at = pending_.erase(at);
  }
}

std::vector<int> Coordinator::Late(int set, const std::string& name) const {
  const auto found = pending_.find({set, name});
  return found == pending_.end() ? std::vector<int>{} : LateOf(found->first, found->second);
}

std::vector<int> Coordinator::LateOf(const Key& key, const Pending& pending) const {
  std::vector<int> late;
  for (const int member : MembersOf(key.first)) {
    const bool gone = left_.count(member) > 0;
    if (!gone && pending.requests.count(member) == 0 && !Joined(member)) late.push_back(member);
  }
  return late;
}

// Why a call cannot be completed, or not yet.
std::string Coordinator::Missing(const Key& key, const Pending& pending) const {
  std::vector<int> gone;
  for (const int member : MembersOf(key.first)) {
    if (left_.count(member) > 0) gone.push_back(member);
  }
  std::ostringstream text;
  text << pending.requests.begin()->second.Described() << " named " << key.second << ": ";
  if (!gone.empty()) {
    text << "all ranks should call it before they shut down or end, or call join(). Received: "
         << Listed(gone) << (gone.size() == 1 ? " has" : " have") << " left";
  } else {
    text << "waited " << timeout_s_ << " s for " << Listed(LateOf(key, pending))
         << ". Has every rank called it under this name? Raise the limit with HVPIPE_TIMEOUT";
  }
  return text.str();
}

std::vector<Coordinator::Outgoing> Coordinator::Expired(const std::function<double(int set)>& clock_of) {
  std::vector<Outgoing> out;
  for (auto at = pending_.begin(); at != pending_.end();) {
    // A rank that has joined waits as long as the others train.
    const bool joins = at->second.requests.begin()->second.kind == Kind::kJoin;
    if (joins || clock_of(at->first.first) - at->second.since_s < timeout_s_) {
      ++at;
      continue;
    }
    Fail(at->first, at->second, ErrorKind::kDeadline, Missing(at->first, at->second), out);
    at = pending_.erase(at);
  }
  return out;
}

}  // namespace hvpipe::named
