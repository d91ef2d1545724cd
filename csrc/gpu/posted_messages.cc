// Keeps posted messages by number.
#include "gpu/posted_messages.h"

#include <iterator>
#include <utility>

namespace hvpipe {

std::int64_t PostedMessages::Add(PostedMessage message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::int64_t number = next_++;
  messages_[number] = std::move(message);
  return number;
}

void PostedMessages::AddAs(std::int64_t number, PostedMessage message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  messages_[number] = std::move(message);
}

std::optional<PostedMessage> PostedMessages::Take(std::int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = messages_.find(number);
  if (found == messages_.end()) return std::nullopt;
  return std::move(messages_.extract(found).mapped());
}

void PostedMessages::EndSends(const Error& error) {
  std::map<std::int64_t, PostedMessage> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = messages_.begin(); it != messages_.end();) {
      const auto next = std::next(it);
      if (it->second.done) ended.insert(messages_.extract(it));
      it = next;
    }
  }
  for (const auto& [number, message] : ended) message.done(&error);
}

}  // namespace hvpipe
