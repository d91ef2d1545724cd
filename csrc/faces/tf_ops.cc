// TensorFlow kernels: announce a step, submit a bucket, collect a bucket; send and take a pipeline message.
// Only the files of this folder named tf_* include TensorFlow.
//
// No op of a step is stateful, because automatic control dependencies would serialise stateful ops. Data
// dependencies order them instead: scale -> submit -> token -> (a variable, into the next step) -> collect.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "faces/tf_ending.h"
#include "faces/tf_types.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/stream_executor/stream.h"

namespace hvpipe {
namespace {

namespace tf = ::tensorflow;

absl::Status ErrorStatus(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kDeadline:
      return absl::DeadlineExceededError(error.what());
    case ErrorKind::kMismatch:
      return absl::FailedPreconditionError(error.what());
    case ErrorKind::kPeer:
    case ErrorKind::kLost:
      return absl::UnavailableError(error.what());
    case ErrorKind::kInternal:
    case ErrorKind::kUsage:
      break;
  }
  return absl::InternalError(error.what());
}

// For every exception: one that leaves a kernel would end the process.
absl::Status ToStatus(const std::exception& failure) { return ErrorStatus(ErrorOf(failure)); }

absl::Status SizeChanged(const std::string& bucket, const tf::TensorShape& shape) {
  return absl::InvalidArgumentError("A gradient changed its size after tracing. Received: bucket=" + bucket +
                                    ", shape=" + shape.DebugString());
}

std::shared_ptr<Engine> EngineOrThrow() {
  auto engine = DefaultEngine();
  if (!engine)
    throw Error("hvpipe is not initialised: call hvpipe.init() before training.", ErrorKind::kUsage);
  return engine;
}

// The CUDA stream that TensorFlow computes on. Work enqueued there runs after the gradients are computed and
// before any use of the results.
//
// Kernels for GPUs are registered for the CPU as well, where tests run them on devices whose memory is host
// memory. A real GPU refuses such arrays.
template <bool kOnGpu>
Device::Stream ComputeStream(tf::OpKernelContext* context) {
  if (!kOnGpu) return nullptr;
  const auto* const device = context->op_device_context();
  if (device == nullptr || device->stream() == nullptr) {
    throw Error("internal: TensorFlow gave a GPU kernel no stream");
  }
  return device->stream()->platform_specific_handle().stream;
}

// On a CPU, TensorFlow frees inputs and reads outputs at once, not in the order of a stream.
template <bool kOnGpu>
void WaitOnCpu(Engine& engine) {
  if (kOnGpu) return;
  Device& device = *engine.device().device;
  const OwnedHandle end = OwnedEvent(device);
  device.Record(end.get(), nullptr);
  while (!device.Reached(end.get())) std::this_thread::yield();
}

// Run `work` on TensorFlow's threads, so that the progress thread can continue.
void RunOnTensorFlow(tf::OpKernelContext* context, std::function<void()> work) {
  if (context->runner() != nullptr) {
    (*context->runner())(std::move(work));
  } else {
    work();
  }
}

REGISTER_OP("HvpipeBeginStep")
    .Input("samples: double")
    .Input("announced: int64")
    .Input("reduces: bool")
    .Attr("plan: int")
    .Output("scale: double")
    .SetShapeFn(tf::shape_inference::ScalarShape);

class BeginStepOp : public tf::AsyncOpKernel {
 public:
  explicit BeginStepOp(tf::OpKernelConstruction* construction) : tf::AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("plan", &plan_));
  }

  bool IsExpensive() override { return false; }  // as SubmitOp

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const auto ending = std::make_shared<Ending>(context, std::move(done));
    try {
      const auto engine = EngineOrThrow();
      const double samples = context->input(0).scalar<double>()();
      const std::int64_t step = context->input(1).scalar<std::int64_t>()() + 1;
      const bool reduces = context->input(2).scalar<bool>()();
      if (engine->log().enabled()) engine->log().Add("mark", "step", Now(), Now());
      const int plan = plan_;
      if (!ending->MayBeCancelled()) return;
      engine->buckets().BeginStep(
          plan, step, samples, reduces,
          [context, ending](const Error* error, double scale, double /*total*/) {
            if (ending->Take()) ending->End(error != nullptr ? ToStatus(*error) : SetScale(context, scale));
          });
    } catch (const std::exception& error) {
      if (ending->Take()) ending->End(ToStatus(error));
    }
  }

 private:
  static absl::Status SetScale(tf::OpKernelContext* context, double scale) {
    try {
      tf::Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(0, tf::TensorShape(), &output));
      output->scalar<double>()() = scale;
      return absl::Status();
    } catch (const std::exception& error) {
      return ToStatus(error);
    }
  }

  int plan_ = 0;
};
REGISTER_KERNEL_BUILDER(Name("HvpipeBeginStep").Device(tf::DEVICE_CPU), BeginStepOp);

REGISTER_OP("HvpipeSubmit")
    .Input("scale: double")
    .Input("tensors: N * T")
    .Attr("plan: int")
    .Attr("bucket: int")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int8}")
    .Output("token: int64")
    .SetShapeFn(tf::shape_inference::ScalarShape);

// After another hvpipe.init(), a bucket's number may belong to another model's plan.
absl::Status CheckSameBucket(const BucketLayout& layout, bool same, std::size_t count, tf::DataType type) {
  if (same && count == layout.counts.size() && EngineType(type) == layout.tensor_type) return absl::Status();
  return absl::InvalidArgumentError("The step was traced before hvpipe.init(): its bucket should be " +
                                    layout.name + " of " + std::to_string(layout.counts.size()) +
                                    " gradients, " + NameOf(layout.tensor_type) +
                                    ". Received: " + std::to_string(count) + ", " + tf::DataTypeString(type));
}

class SubmitOp : public tf::OpKernel {
 public:
  explicit SubmitOp(tf::OpKernelConstruction* construction) : tf::OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("plan", &plan_));
    OP_REQUIRES_OK(construction, construction->GetAttr("bucket", &bucket_));
  }

  // TensorFlow then runs it at once, on the thread that has computed the bucket's last gradient. An expensive
  // operation would wait behind those with which backward goes on.
  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext* context) override {
    try {
      const auto engine = EngineOrThrow();
      const BucketLayout& layout = engine->buckets().layout(plan_, bucket_);
      tf::OpInputList tensors;
      OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
      const auto number = static_cast<std::size_t>(tensors.size());
      OP_REQUIRES_OK(context, CheckSameBucket(layout, true, number, context->input_dtype(1)));
      std::vector<const void*> pointers;
      for (int i = 0; i < tensors.size(); ++i) {
        OP_REQUIRES(
            context,
            static_cast<std::size_t>(tensors[i].NumElements()) == layout.counts[static_cast<std::size_t>(i)],
            SizeChanged(layout.name, tensors[i].shape()));
        pointers.push_back(tensors[i].tensor_data().data());
      }
      SubmitTensors(*engine, context, pointers, context->input(0).scalar<double>()());
      OP_REQUIRES_OK(context, SetToken(context));
    } catch (const std::exception& error) {
      context->SetStatus(ToStatus(error));
    }
  }

 protected:
  static absl::Status SetToken(tf::OpKernelContext* context) {
    tf::Tensor* token = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, tf::TensorShape(), &token));
    token->scalar<std::int64_t>()() = 1;
    return absl::Status();
  }

  virtual void SubmitTensors(Engine& engine, tf::OpKernelContext* /*context*/,
                             const std::vector<const void*>& tensors, double scale) const {
    engine.buckets().Submit(plan_, bucket_, tensors, scale);
  }

  int plan_ = 0;
  int bucket_ = 0;
};
REGISTER_KERNEL_BUILDER(Name("HvpipeSubmit").Device(tf::DEVICE_CPU), SubmitOp);

// The kernels' label on the CPU.
constexpr char kDeviceMemory[] = "device_memory";

template <bool kOnGpu>
class GpuSubmitOp : public SubmitOp {
 public:
  using SubmitOp::SubmitOp;

 protected:
  void SubmitTensors(Engine& engine, tf::OpKernelContext* context, const std::vector<const void*>& tensors,
                     double scale) const override {
    engine.buckets().SubmitDevice(plan_, bucket_, tensors, scale, ComputeStream<kOnGpu>(context));
    WaitOnCpu<kOnGpu>(engine);
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeSubmit").Device(tf::DEVICE_GPU).HostMemory("scale").HostMemory("token"),
                        GpuSubmitOp<true>);
REGISTER_KERNEL_BUILDER(Name("HvpipeSubmit").Device(tf::DEVICE_CPU).Label(kDeviceMemory), GpuSubmitOp<false>);

// Submits a table of which few rows are not zero: their numbers and values (IndexedSlices). On the CPU only.
REGISTER_OP("HvpipeSubmitRows")
    .Input("scale: double")
    .Input("rows: int64")
    .Input("values: T")
    .Attr("plan: int")
    .Attr("bucket: int")
    .Attr("T: {half, bfloat16, float, double}")
    .Output("token: int64")
    .SetShapeFn(tf::shape_inference::ScalarShape);

class SubmitRowsOp : public SubmitOp {
 public:
  using SubmitOp::SubmitOp;

  void Compute(tf::OpKernelContext* context) override {
    try {
      const auto engine = EngineOrThrow();
      const BucketLayout& layout = engine->buckets().layout(plan_, bucket_);
      const tf::Tensor &rows = context->input(1), &values = context->input(2);
      const auto count = static_cast<std::size_t>(rows.NumElements());
      OP_REQUIRES_OK(context, CheckSameBucket(layout, layout.row > 0, 1, values.dtype()));
      OP_REQUIRES(context, static_cast<std::size_t>(values.NumElements()) == count * layout.row,
                  SizeChanged(layout.name, values.shape()));
      engine->buckets().SubmitRows(plan_, bucket_, rows.flat<std::int64_t>().data(), count,
                                   values.tensor_data().data(), context->input(0).scalar<double>()());
      OP_REQUIRES_OK(context, SetToken(context));
    } catch (const std::exception& error) {
      context->SetStatus(ToStatus(error));
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeSubmitRows").Device(tf::DEVICE_CPU), SubmitRowsOp);

REGISTER_OP("HvpipeCollect")
    .Input("token: int64")
    .Attr("plan: int")
    .Attr("bucket: int")
    .Attr("shapes: list(shape) >= 1")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int8}")
    .Attr("on_stream: bool = false")
    .Output("tensors: N * T")
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      std::vector<tf::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
      for (int i = 0; i < context->num_outputs(); ++i) {
        tf::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(
            context->MakeShapeFromPartialTensorShape(shapes[static_cast<std::size_t>(i)], &shape));
        context->set_output(i, shape);
      }
      return absl::Status();
    });

// One tensor inside a fused buffer. The buffer lives as long as any of its tensors.
class TensorInBuffer : public tf::TensorBuffer {
 public:
  TensorInBuffer(std::shared_ptr<AlignedBuffer> buffer, const BucketLayout& layout, std::size_t index)
      : tf::TensorBuffer(static_cast<char*>(buffer->data()) +
                         layout.offsets[index] * SizeOf(layout.wire_type)),
        buffer_(std::move(buffer)),
        bytes_(layout.counts[index] * SizeOf(layout.wire_type)) {}

  std::size_t size() const override { return bytes_; }
  tf::TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tf::AllocationDescription* /*proto*/) const override {}

 private:
  std::shared_ptr<AlignedBuffer> buffer_;
  std::size_t bytes_;
};

class CollectOp : public tf::AsyncOpKernel {
 public:
  explicit CollectOp(tf::OpKernelConstruction* construction) : tf::AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("plan", &plan_));
    OP_REQUIRES_OK(construction, construction->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(construction, construction->GetAttr("shapes", &shapes_));
    OP_REQUIRES_OK(construction, construction->GetAttr("on_stream", &on_stream_));
  }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const auto ending = std::make_shared<Ending>(context, std::move(done));
    const int plan = plan_, bucket = bucket_;
    const bool on_stream = on_stream_;
    (void)ending->MayBeCancelled();  // even then the sum is collected: the next step needs the bucket
    try {
      const auto engine = EngineOrThrow();
      const absl::Status fits = Fits(engine->buckets().layout(plan, bucket), context);
      if (!fits.ok()) {
        if (ending->Take()) ending->End(fits);
        return;
      }
      engine->buckets().Collect(
          plan, bucket,
          // Copies, because a cancelled op may be gone before the sum is complete.
          [this, plan, bucket, engine, context, ending](const Error* error) {
            if (ending->Take()) {
              Finish(engine, context, error, ending);
            } else if (error == nullptr) {
              engine->buckets().Discard(plan, bucket);
            }
          },
          on_stream);
    } catch (const std::exception& error) {
      if (ending->Take()) ending->End(ToStatus(error));
    }
  }

 protected:
  absl::Status Fits(const BucketLayout& layout, tf::OpKernelContext* context) const {
    const bool same = std::equal(shapes_.begin(), shapes_.end(), layout.counts.begin(), layout.counts.end(),
                                 [](const tf::TensorShape& shape, std::size_t count) {
                                   return static_cast<std::size_t>(shape.num_elements()) == count;
                                 });
    const tf::DataType type = context->expected_output_dtype(context->num_outputs() - 1);
    return CheckSameBucket(layout, same, shapes_.size(), type);
  }

  // Runs when the sum is complete, maybe on the progress thread.
  void Finish(const std::shared_ptr<Engine>& engine, tf::OpKernelContext* context, const Error* error,
              const std::shared_ptr<Ending>& ending) const {
    try {
      if (error != nullptr) throw *error;
      RunOnTensorFlow(context, [this, engine, context, ending] {
        absl::Status status;
        try {
          status = Unpack(*engine, context);
        } catch (const std::exception& failed) {
          status = ToStatus(failed);
        }
        ending->End(status);
      });
    } catch (const std::exception& failed) {
      ending->End(ToStatus(failed));
    }
  }

  virtual absl::Status Unpack(Engine& engine, tf::OpKernelContext* context) const {
    const BucketLayout& layout = engine.buckets().layout(plan_, bucket_);
    if (const std::shared_ptr<AlignedBuffer> buffer = engine.buckets().Take(plan_, bucket_)) {
      for (std::size_t i = 0; i < shapes_.size(); ++i) {
        const int output = static_cast<int>(i);
        tf::core::RefCountPtr<tf::TensorBuffer> part(new TensorInBuffer(buffer, layout, i));
        context->set_output(output,
                            tf::Tensor(context->expected_output_dtype(output), shapes_[i], std::move(part)));
      }
      return absl::Status();
    }
    std::vector<void*> pointers;
    TF_RETURN_IF_ERROR(Allocate(context, pointers));
    engine.buckets().Unpack(plan_, bucket_, pointers);
    return absl::Status();
  }

  absl::Status Allocate(tf::OpKernelContext* context, std::vector<void*>& pointers) const {
    tf::OpOutputList outputs;
    TF_RETURN_IF_ERROR(context->output_list("tensors", &outputs));
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      tf::Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(outputs.allocate(static_cast<int>(i), shapes_[i], &tensor));
      pointers.push_back(tensor->data());
    }
    return absl::Status();
  }

  int plan_ = 0;
  int bucket_ = 0;
  bool on_stream_ = false;
  std::vector<tf::TensorShape> shapes_;
};
REGISTER_KERNEL_BUILDER(Name("HvpipeCollect").Device(tf::DEVICE_CPU), CollectOp);

// Collects a table as SubmitRows takes it: ascending row numbers, and their values. `shapes`: the table's.
REGISTER_OP("HvpipeCollectRows")
    .Input("token: int64")
    .Attr("plan: int")
    .Attr("bucket: int")
    .Attr("shapes: list(shape) >= 1")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("on_stream: bool = false")
    .Output("rows: int64")
    .Output("values: T")
    .SetShapeFn(tf::shape_inference::UnknownShape);

class CollectRowsOp : public CollectOp {
 public:
  using CollectOp::CollectOp;

 protected:
  absl::Status Unpack(Engine& engine, tf::OpKernelContext* context) const override {
    const auto count = static_cast<std::int64_t>(engine.buckets().RowsOf(plan_, bucket_));
    tf::TensorShape shape = shapes_.front();
    shape.set_dim(0, count);
    tf::Tensor *rows = nullptr, *values = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, tf::TensorShape({count}), &rows));
    TF_RETURN_IF_ERROR(context->allocate_output(1, shape, &values));
    engine.buckets().UnpackRows(plan_, bucket_, rows->flat<std::int64_t>().data(), values->data());
    return absl::Status();
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeCollectRows").Device(tf::DEVICE_CPU), CollectRowsOp);

// TensorFlow computes on one stream, so a wait for the network on that stream delays all later work. With
// `on_stream` that is intended, and TensorFlow goes on enqueueing. Otherwise the op ends when the sum is
// complete.
template <bool kOnGpu>
class GpuCollectOp : public CollectOp {
 public:
  using CollectOp::CollectOp;

 protected:
  absl::Status Unpack(Engine& engine, tf::OpKernelContext* context) const override {
    std::vector<void*> pointers;
    TF_RETURN_IF_ERROR(Allocate(context, pointers));
    engine.buckets().UnpackDevice(plan_, bucket_, pointers, ComputeStream<kOnGpu>(context));
    WaitOnCpu<kOnGpu>(engine);
    return absl::Status();
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeCollect").Device(tf::DEVICE_GPU).HostMemory("token"), GpuCollectOp<true>);
REGISTER_KERNEL_BUILDER(Name("HvpipeCollect").Device(tf::DEVICE_CPU).Label(kDeviceMemory),
                        GpuCollectOp<false>);

// Hands the array to a message that was announced by PostSend. Does not wait.
REGISTER_OP("HvpipeSendMessage")
    .Input("number: int64")
    .Input("tensor: T")
    .Attr("T: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs);

// Takes the array of a message that has arrived (PostReceive), or of a sum (PostGroupReduce).
REGISTER_OP("HvpipeTakeMessage")
    .Input("number: int64")
    .Input("shape: int64")
    .Attr("T: {half, bfloat16, float, double}")
    .Output("tensor: T")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnknownShape);

template <bool kOnGpu>
class SendMessageOp : public tf::OpKernel {
 public:
  using tf::OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* context) override {
    try {
      const auto held = std::make_shared<tf::Tensor>(context->input(1));
      const auto bytes = held->tensor_data();
      EngineOrThrow()->device_messages().SendPosted(context->input(0).scalar<std::int64_t>()(), bytes.data(),
                                                    bytes.size(), ComputeStream<kOnGpu>(context), held);
    } catch (const std::exception& error) {
      context->SetStatus(ToStatus(error));
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeSendMessage").Device(tf::DEVICE_CPU), SendMessageOp<false>);
REGISTER_KERNEL_BUILDER(Name("HvpipeSendMessage").Device(tf::DEVICE_GPU).HostMemory("number"),
                        SendMessageOp<true>);

template <bool kOnGpu>
class TakeMessageOp : public tf::OpKernel {
 public:
  using tf::OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* context) override {
    try {
      tf::TensorShape shape;
      const auto axes = context->input(1).vec<std::int64_t>();
      OP_REQUIRES_OK(context,
                     tf::TensorShape::BuildTensorShape(
                         absl::MakeConstSpan(axes.data(), static_cast<std::size_t>(axes.size())), &shape));
      tf::Tensor* tensor = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(0, shape, &tensor));
      const auto engine = EngineOrThrow();
      engine->device_messages().TakePosted(context->input(0).scalar<std::int64_t>()(), tensor->data(),
                                           static_cast<std::size_t>(tensor->NumElements()),
                                           EngineType(tensor->dtype()), ComputeStream<kOnGpu>(context));
      WaitOnCpu<kOnGpu>(*engine);
    } catch (const std::exception& error) {
      context->SetStatus(ToStatus(error));
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeTakeMessage").Device(tf::DEVICE_CPU), TakeMessageOp<false>);
REGISTER_KERNEL_BUILDER(
    Name("HvpipeTakeMessage").Device(tf::DEVICE_GPU).HostMemory("number").HostMemory("shape"),
    TakeMessageOp<true>);

// 1, in host memory. TensorFlow neither folds nor moves it, so it comes when what it waits for is enqueued.
REGISTER_OP("HvpipeOne").Output("one: int32").SetIsStateful().SetShapeFn(tf::shape_inference::ScalarShape);

class OneOp : public tf::OpKernel {
 public:
  using tf::OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* context) override {
    tf::Tensor* one = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tf::TensorShape(), &one));
    one->scalar<std::int32_t>()() = 1;
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeOne").Device(tf::DEVICE_CPU), OneOp);
REGISTER_KERNEL_BUILDER(Name("HvpipeOne").Device(tf::DEVICE_GPU).HostMemory("one"), OneOp);

// Passes a value on and records the time for the trace.
REGISTER_OP("HvpipeMark")
    .Input("value: T")
    .Attr("label: string")
    .Attr("T: type")
    .Output("same: T")
    .SetShapeFn(tf::shape_inference::UnchangedShape);

class MarkOp : public tf::OpKernel {
 public:
  explicit MarkOp(tf::OpKernelConstruction* construction) : tf::OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("label", &label_));
  }

  void Compute(tf::OpKernelContext* context) override {
    if (const auto engine = DefaultEngine()) engine->log().Add("mark", label_, Now(), Now());
    context->set_output(0, context->input(0));
  }

 private:
  std::string label_;
};
REGISTER_KERNEL_BUILDER(Name("HvpipeMark").Device(tf::DEVICE_CPU), MarkOp);
// On a GPU this is the time of enqueueing; the value is computed later.
REGISTER_KERNEL_BUILDER(Name("HvpipeMark").Device(tf::DEVICE_GPU), MarkOp);

}  // namespace
}  // namespace hvpipe
