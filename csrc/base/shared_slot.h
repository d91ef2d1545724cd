// A place for an object of the whole process, which threads share.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace hvpipe {

template <typename T>
class SharedSlot {
 public:
  // The object before it may end here, which can take long: not under the lock.
  void Set(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    object_.swap(object);
  }

  std::shared_ptr<T> Get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return object_;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<T> object_;
};

}  // namespace hvpipe
