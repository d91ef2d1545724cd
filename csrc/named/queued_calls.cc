// The queue of calls that another library runs.
#include "named/queued_calls.h"

#include <numeric>
#include <utility>

namespace hvpipe::named {

QueuedCalls::QueuedCalls(int rank, int size) : CallService(rank, size) {
  auto& everyone = sets_[0];
  everyone.resize(static_cast<std::size_t>(size));
  std::iota(everyone.begin(), everyone.end(), 0);
}

void QueuedCalls::Submit(Call call) {
  try {
    const std::string refused = Check(call.request);
    if (!refused.empty()) throw CallError{Problem::kMismatch, refused};
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) throw CallError{Problem::kUsage, "hvpipe has been shut down. Call init() again."};
    queue_.push_back(std::move(call));
  } catch (const CallError& error) {
    return Fail(call, error);
  }
  changed_.notify_one();
}

std::unique_ptr<Call> QueuedCalls::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
  if (queue_.empty()) return nullptr;
  auto call = std::make_unique<Call>(std::move(queue_.front()));
  queue_.pop_front();
  return call;
}

void QueuedCalls::Finish(const Call& call, const Response& response) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (call.request.kind == Kind::kAddSet) {
      sets_[response.number] = std::vector<int>(response.extents.begin(), response.extents.end());
    } else if (call.request.kind == Kind::kRemoveSet) {
      sets_.erase(call.request.root);
    }
  }
  call.done(nullptr, &response);
}

void QueuedCalls::Fail(const Call& call, const CallError& error) { call.done(&error, nullptr); }

void QueuedCalls::Stop() {
  std::deque<Call> left;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    left.swap(queue_);
  }
  changed_.notify_all();
  const CallError error{Problem::kUsage, "hvpipe has been shut down. Call init() again."};
  for (const Call& call : left) Fail(call, error);
}

std::vector<int> QueuedCalls::RanksOf(int set) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(set);
  return found == sets_.end() ? std::vector<int>{} : found->second;
}

std::vector<int> QueuedCalls::Sets() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> numbers;
  for (const auto& [number, ranks] : sets_) numbers.push_back(number);
  return numbers;
}

}  // namespace hvpipe::named
