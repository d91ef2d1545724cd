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
// Whoever takes the ending ends the op. The op's context lives until then, so the engine must take the ending
// before it touches the context.
class Ending {
 public:
  static std::shared_ptr<Ending> Of(tensorflow::OpKernelContext* context,
                                    tensorflow::AsyncOpKernel::DoneCallback done) {
    const auto ending = std::make_shared<Ending>(context, std::move(done));
    auto* const cancellation = context->cancellation_manager();
    if (cancellation == nullptr) return ending;
    ending->token_ = cancellation->get_cancellation_token();
    ending->cancellation_ = cancellation;
    const auto cancel = [ending] {
      if (ending->Take()) ending->Finish(Cancelled());  // must not call the manager
    };
    if (!cancellation->RegisterCallback(ending->token_, cancel)) cancel();
    return ending;
  }

  Ending(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done)
      : context_(context), done_(std::move(done)) {}

  // True for the first caller, who then ends the op. False: the op has ended, and its context may be gone.
  bool Take() { return !taken_.exchange(true); }

  // True once the op has ended or is about to.
  bool taken() const { return taken_; }

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
