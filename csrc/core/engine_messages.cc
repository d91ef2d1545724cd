// Messages between two ranks, and all-reduces of some of the ranks, all without waiting.
#include <algorithm>
#include <utility>

#include "core/engine.h"
#include "collectives/message.h"
#include "collectives/tags.h"

namespace hvpipe {

std::shared_ptr<Operation> Engine::MessageOperation(const char* category, const std::string& what,
                                                    Done done) {
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->priority = kMessagePriority;
  operation->traced = category;
  operation->of_all_ranks = false;
  operation->finished = std::move(done);
  return operation;
}

// Its maker runs when the operation's turn has come, behind those of its `order`.
void Engine::StartMessage(const char* category, const std::string& what,
                          std::function<std::unique_ptr<Collective>()> make, OrderQueue* order, Done done) {
  const auto operation = MessageOperation(category, what, std::move(done));
  operation->stages.push_back({[=](const Operation&) { return make(); }, order, nullptr});
  progress_->Enqueue({operation}, true);
}

// MPI matches messages by peer and tag alone: the segments of two with the same ones must not mix.
OrderQueue* Engine::MessageOrder(bool sent, const MessageOptions& options) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return &message_order_[{sent, options.peer, options.tag}];
}

MessageOptions Engine::MessageTo(int peer, int tag) const {
  if (peer < 0 || peer >= size_ || peer == rank_) {
    throw Error("The peer of a message should be another rank of " + std::to_string(size_) +
                    ". Received: peer=" + std::to_string(peer) + " on rank " + std::to_string(rank_),
                ErrorKind::kUsage);
  }
  if (tag < 0 || tag >= kMessageTags) {
    throw Error("The tag of a message should be from 0 to " + std::to_string(kMessageTags - 1) +
                    ". Received: tag=" + std::to_string(tag),
                ErrorKind::kUsage);
  }
  return {peer, tag, options_.segment_bytes, options_.messages_in_flight};
}

void Engine::Send(int peer, int tag, const void* data, std::size_t bytes, const std::string& what,
                  Done done) {
  const MessageOptions options = MessageTo(peer, tag);
  StartMessage(
      "transfer", what,
      [=] { return std::make_unique<MessageSend>(*messages_, counters_, data, bytes, options); },
      MessageOrder(true, options), std::move(done));
  progress_->StepOnce();
}

std::shared_ptr<AlignedBuffer> Engine::Receive(int peer, int tag, std::size_t bytes, const std::string& what,
                                               Done done) {
  const MessageOptions options = MessageTo(peer, tag);
  auto buffer = std::make_shared<AlignedBuffer>(bytes);
  StartMessage(
      "transfer", what,
      [=] { return std::make_unique<MessageReceive>(*messages_, counters_, buffer->data(), bytes, options); },
      MessageOrder(false, options),
      // Holds on to the buffer until nothing more can be written into it.
      [buffer, done = std::move(done)](const Error* error) { done(error); });
  return buffer;
}

int Engine::AddGroup(const std::vector<int>& ranks, const Interrupt& interrupt) {
  if (stopped_) throw ShutDown();
  if (const auto error = progress_->error()) throw *error;
  const bool ordered = std::is_sorted(ranks.begin(), ranks.end()) &&
                       std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end();
  if (!ordered || ranks.size() < 2 || ranks.front() < 0 || ranks.back() >= size_ ||
      !std::binary_search(ranks.begin(), ranks.end(), rank_)) {
    throw Error("A group should be two or more ranks in ascending order, rank " + std::to_string(rank_) +
                    " among them. Received: " + std::to_string(ranks.size()) + " ranks",
                ErrorKind::kUsage);
  }
  Meet(ranks, interrupt);
  MPI_Group everyone = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  HVPIPE_MPI(MPI_Comm_group(messages_->communicator(), &everyone));
  HVPIPE_MPI(MPI_Group_incl(everyone, static_cast<int>(ranks.size()), ranks.data(), &some));
  HVPIPE_MPI(MPI_Comm_create_group(messages_->communicator(), some, kGroupTag, &communicator));
  HVPIPE_MPI(MPI_Group_free(&some));
  HVPIPE_MPI(MPI_Group_free(&everyone));
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_.push_back(std::make_unique<Group>(Group{std::make_unique<MpiTransport>(communicator), 0}));
  return static_cast<int>(groups_.size() - 1);
}

// Returns when all of `ranks` have called it. What follows in MPI has no deadline.
void Engine::Meet(const std::vector<int>& ranks, const Interrupt& interrupt) {
  auto meeting = std::make_shared<Operation>();
  meeting->what = "the meeting of a group of " + std::to_string(ranks.size()) + " ranks";
  meeting->priority = kMessagePriority;
  meeting->of_all_ranks = false;
  meeting->stages.push_back(
      {[&](const Operation&) -> std::unique_ptr<Collective> {
         std::vector<std::unique_ptr<Collective>> words;
         for (const int peer : ranks) {
           if (peer == rank_) continue;
           const MessageOptions options{peer, kMeetingTag, 1, 1};
           words.push_back(std::make_unique<MessageReceive>(*messages_, counters_, nullptr, 0, options));
           words.push_back(std::make_unique<MessageSend>(*messages_, counters_, nullptr, 0, options));
         }
         return std::make_unique<Together>(std::move(words));
       },
       nullptr, nullptr});
  progress_->Run(meeting, interrupt);
}

void Engine::GroupAllReduce(int group, void* data, std::size_t count, DType dtype, const std::string& what,
                            Done done) {
  Group* of = nullptr;
  int tag = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (group < 0 || static_cast<std::size_t>(group) >= groups_.size()) {
      throw Error("Unknown group. Received: group=" + std::to_string(group), ErrorKind::kUsage);
    }
    of = groups_[static_cast<std::size_t>(group)].get();
    tag = of->calls++ % kCallTags;
  }
  StartMessage(
      "reduce", what, [=] { return Ring(*of->transport, data, count, dtype, tag); }, nullptr,
      std::move(done));
}

}  // namespace hvpipe
