// The end of an asynchronous op, which comes from the engine or from TensorFlow's cancellation.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace hvpipe {

// When an op of a step fails, TensorFlow cancels the others and waits for them. Without this, an op that
// waits for another rank would keep the error back until the time limit.
//
// Whoever takes the ending ends the op. The op and its context live until then: after MayBeCancelled, take
// the ending before you touch them.
class Ending : public std::enable_shared_from_this<Ending> {
 public:
  // From now on a cancellation may end the op. Returns false if it has done so already.
  bool MayBeCancelled() {
    auto* const cancellation = context_->cancellation_manager();
    if (cancellation == nullptr) return true;
    token_ = cancellation->get_cancellation_token();
    cancellation_ = cancellation;
    const auto cancel = [ending = shared_from_this()] {
      if (ending->Take()) ending->Finish(Cancelled());  // must not call the manager
    };
    if (!cancellation->RegisterCallback(token_, cancel)) cancel();
    return !taken_;
  }

  Ending(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done)
      : context_(context), done_(std::move(done)) {}

  // True for the first caller, who then ends the op. False: the op has ended, and its context may be gone.
  bool Take() { return !taken_.exchange(true); }

  // Only after Take.
  void End(const absl::Status& status) {
    // Does not wait for a cancellation that runs now: it finds the ending taken.
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
    Finish(status);
  }

 private:
  void Finish(const absl::Status& status) {
    context_->SetStatus(status);
    const auto done = std::exchange(done_, nullptr);
    done();
  }

  static absl::Status Cancelled() {
    return absl::CancelledError(
        "Another op of this step failed, so this one no longer waits for the other ranks.");
  }

  tensorflow::OpKernelContext* const context_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  tensorflow::CancellationManager* cancellation_ = nullptr;
  tensorflow::CancellationToken token_ = 0;
  std::atomic<bool> taken_{false};
};

}  // namespace hvpipe
