// Rank 0's book of calls: finds the ones that all ranks have made, and the ones on which ranks disagree.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "named/call.h"

namespace hvpipe::named {

// Such as "ranks 1, 2".
std::string Listed(const std::vector<int>& ranks);

// Pure bookkeeping, without MPI and without threads.
//
// A call is complete when every rank of its process set has made it under the same name. The order of the
// responses is the same for all ranks, so all ranks run their collectives in one order and none can wait for
// another in a circle.
class Coordinator {
 public:
  Coordinator(int ranks, double timeout_s);

  struct Outgoing {
    int rank;
    Response response;
  };

  // A rank has made a call. Returns what to tell the ranks, in order.
  std::vector<Outgoing> OnRequest(int rank, Request request, double now_s);
  // Responses for calls that have waited too long.
  std::vector<Outgoing> Expired(const std::function<double(int set)>& clock_of);
  // Whether every rank has left.
  bool all_left() const { return static_cast<int>(left_.size()) == ranks_; }
  // The ranks that a call waits for; empty if there is no such call.
  std::vector<int> Late(int set, const std::string& name) const;
  bool idle() const { return pending_.empty(); }

 private:
  using Key = std::pair<int, std::string>;  // process set and name
  struct Pending {
    std::map<int, Request> requests;  // by rank
    double since_s = 0;
  };

  const std::vector<int>& MembersOf(int set) const;
  bool Joined(int rank) const { return joined_.count(rank) > 0; }
  bool Complete(const Key& key, const Pending& pending) const;
  void Fail(const Key& key, const Pending& pending, ErrorKind kind, const std::string& error,
            std::vector<Outgoing>& out) const;
  void Finish(const Key& key, const Pending& pending, std::vector<Outgoing>& out);
  void FinishWhatIsComplete(std::vector<Outgoing>& out);
  void FailWhatNeeds(int rank, std::vector<Outgoing>& out);
  // Empty if the ranks agree.
  std::string Difference(const Pending& pending) const;
  std::string TooManyRows(const Pending& pending) const;
  std::string ProblemWithJoined(const Request& request, const std::vector<int>& members) const;
  void Answer(const Key& key, const Pending& pending, std::vector<Outgoing>& out);
  void FailRemoved(int set, std::vector<Outgoing>& out);
  std::string AddSet(const Request& request, Response& response);
  std::vector<int> LateOf(const Key& key, const Pending& pending) const;
  std::string Missing(const Key& key, const Pending& pending) const;

  const int ranks_;
  const double timeout_s_;
  std::map<int, std::vector<int>> sets_;  // ranks in ascending order
  int next_set_ = 1;
  std::map<Key, Pending> pending_;
  std::set<int> joined_;
  int last_joined_ = -1;
  std::set<int> left_;
};

}  // namespace hvpipe::named
