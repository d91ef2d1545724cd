// TensorFlow kernels of the named collectives.
//
// The ops are not stateful: TensorFlow runs stateful ops of a function one after the other, and ranks whose
// functions order them differently would wait for each other. But TensorFlow computes an op that is not
// stateful and has constant inputs only once, while it optimises the graph. So each has an input from
// HvpipeFactors, which is stateful and never waits.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "faces/tf_ending.h"
#include "faces/tf_types.h"
#include "named/named_calls.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvpipe {
namespace {

namespace tf = ::tensorflow;
using named::Kind;
using tf::shape_inference::InferenceContext;

absl::Status ToStatus(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kMismatch:
      return absl::FailedPreconditionError(error.what());
    case ErrorKind::kDeadline:
      return absl::DeadlineExceededError(error.what());
    case ErrorKind::kPeer:
    case ErrorKind::kLost:
      return absl::UnavailableError(error.what());
    default:
      return absl::InvalidArgumentError(error.what());
  }
}

// The calls of functions that lead to a node: "StatefulPartitionedCall_1/" for the node
// "layer/StatefulPartitionedCall_1/HvpipeNamedAllreduce". A function that is called twice in a graph is there
// twice after TensorFlow has inlined it, and both may run at the same time. Other scopes are left out: layers
// may be numbered differently on each rank.
std::string CallersOf(const std::string& node) {
  std::string callers;
  for (std::size_t begin = 0, end; (end = node.find('/', begin)) != std::string::npos; begin = end + 1) {
    const std::string part = node.substr(begin, end - begin);
    const std::string kind = part.substr(0, part.find_last_not_of("_0123456789") + 1);
    if (kind == "PartitionedCall" || kind == "StatefulPartitionedCall") callers += part + "/";
  }
  return callers;
}

// The memory of one call. The other ranks need it even if this rank's step has failed and the op is
// cancelled, and messages may use it after an error. Only the driving thread writes to it after the start.
struct Memory {
  std::vector<tf::Tensor> inputs, outputs;
  std::vector<std::vector<char>> unwanted;  // outputs of a cancelled op
  bool runs = false;                        // has taken the ending: the collective runs, so it ends soon

  void* Output(tf::OpKernelContext* context, Ending& ending, int index, const named::Shape& shape) {
    tf::TensorShape wanted;
    for (const std::int64_t size : shape) wanted.AddDim(size);
    if (!runs && !ending.Take()) {
      constexpr std::int64_t kLargestElement = 8;
      return unwanted.emplace_back(static_cast<std::size_t>(wanted.num_elements() * kLargestElement)).data();
    }
    runs = true;
    tf::Tensor* output = nullptr;
    const absl::Status status = context->allocate_output(index, wanted, &output);
    if (!status.ok()) throw Error(std::string(status.message()), ErrorKind::kUsage);
    outputs.push_back(*output);
    return output->data();
  }
};

// The inputs in order: tensors, splits (alltoall only), factors.
template <Kind kKind>
class NamedOp : public tf::AsyncOpKernel {
 public:
  explicit NamedOp(tf::OpKernelConstruction* construction) : tf::AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("call", &name_));
    name_ = CallersOf(name()) + name_;
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set", &set_));
    if constexpr (kKind == Kind::kAllreduce || kKind == Kind::kReducescatter) {
      OP_REQUIRES_OK(construction, construction->GetAttr("reduce_op", &op_));
    }
    if constexpr (kKind == Kind::kBroadcast) {
      OP_REQUIRES_OK(construction, construction->GetAttr("root_rank", &root_));
    }
  }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const auto ending = std::make_shared<Ending>(context, std::move(done));
    try {
      Start(context, ending);
    } catch (const std::exception& error) {  // one that leaves a kernel would end the process
      if (ending->Take()) ending->End(absl::InternalError(ErrorOf(error).what()));
    }
  }

 private:
  void Start(tf::OpKernelContext* context, const std::shared_ptr<Ending>& ending) const {
    const auto calls = named::DefaultCalls();
    if (calls == nullptr) {
      if (ending->Take())
        ending->End(absl::FailedPreconditionError("hvpipe is not initialised: call init() first."));
      return;
    }
    constexpr bool kSplits = kKind == Kind::kAlltoall;
    named::Call call;
    call.request.kind = kKind;
    call.request.name = name_;
    call.request.set = set_;
    call.request.op = static_cast<named::ReduceOp>(op_);
    call.request.root = root_;
    const int tensors = context->num_inputs() - (kSplits ? 2 : 1);
    const auto memory = std::make_shared<Memory>();
    for (int i = 0; i < tensors; ++i) {
      const tf::Tensor& tensor = context->input(i);
      named::TensorSpec spec{EngineType(tensor.dtype()), {}};
      for (int axis = 0; axis < tensor.dims(); ++axis) spec.shape.push_back(tensor.dim_size(axis));
      call.request.tensors.push_back(std::move(spec));
      call.inputs.push_back(tensor.tensor_data().data());
      memory->inputs.push_back(tensor);
    }
    if constexpr (kSplits) {
      const tf::Tensor& splits = context->input(tensors);
      if (splits.dims() != 1) {
        call.request.refused =
            "splits should have one axis. Received: splits of shape " + splits.shape().DebugString();
      } else {
        const auto given = splits.vec<std::int32_t>();
        call.request.splits.assign(given.data(), given.data() + given.size());
      }
    }
    const auto factors = context->input(context->num_inputs() - 1).vec<double>();
    call.request.prescale = factors(0);
    call.request.postscale = factors(1);
    call.allocate = [context, ending, memory](int index, const named::Shape& shape) {
      return memory->Output(context, *ending, index, shape);
    };
    call.done = [context, ending, memory](const Error* error, const named::Response* /*response*/) {
      if (error == nullptr) memory->outputs.clear();  // so that TensorFlow may reuse them
      if (!memory->runs && !ending->Take()) return;
      const absl::Status status = error != nullptr ? ToStatus(*error) : absl::Status();
      const auto end = [ending, status] { ending->End(status); };
      // What comes next in the graph must not run on the driving thread: it may make a call and wait for it.
      if (context->runner() != nullptr) {
        (*context->runner())(end);
      } else {
        end();
      }
    };
    if (ending->MayBeCancelled()) calls->Submit(std::move(call));
  }

  std::string name_;
  int set_ = 0;
  int op_ = static_cast<int>(named::ReduceOp::kSum);
  int root_ = 0;
};

absl::Status SameShapes(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i));
  return absl::Status();
}

// The first axis depends on the other ranks.
absl::Status OtherRows(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) {
    tf::shape_inference::ShapeHandle shape = context->input(i);
    if (context->RankKnown(shape) && context->Rank(shape) > 0) {
      TF_RETURN_IF_ERROR(context->ReplaceDim(shape, 0, context->UnknownDim(), &shape));
    }
    context->set_output(i, shape);
  }
  return absl::Status();
}

REGISTER_OP("HvpipeNamedAllreduce")
    .Input("tensors: Ts")
    .Input("factors: double")
    .Attr("Ts: list({uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}) >= 1")
    .Attr("call: string")
    .Attr("process_set: int")
    .Attr("reduce_op: int")
    .Output("reduced: Ts")
    .SetShapeFn(SameShapes);
REGISTER_KERNEL_BUILDER(Name("HvpipeNamedAllreduce").Device(tf::DEVICE_CPU), NamedOp<Kind::kAllreduce>);

REGISTER_OP("HvpipeNamedAllgather")
    .Input("tensors: Ts")
    .Input("factors: double")
    .Attr("Ts: list({bool, uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}) >= 1")
    .Attr("call: string")
    .Attr("process_set: int")
    .Output("gathered: Ts")
    .SetShapeFn(OtherRows);
REGISTER_KERNEL_BUILDER(Name("HvpipeNamedAllgather").Device(tf::DEVICE_CPU), NamedOp<Kind::kAllgather>);

REGISTER_OP("HvpipeNamedBroadcast")
    .Input("tensors: Ts")
    .Input("factors: double")
    .Attr("Ts: list({bool, uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}) >= 1")
    .Attr("call: string")
    .Attr("process_set: int")
    .Attr("root_rank: int")
    .Output("received: Ts")
    .SetShapeFn(SameShapes);
REGISTER_KERNEL_BUILDER(Name("HvpipeNamedBroadcast").Device(tf::DEVICE_CPU), NamedOp<Kind::kBroadcast>);

REGISTER_OP("HvpipeNamedAlltoall")
    .Input("tensor: T")
    .Input("splits: int32")
    .Input("factors: double")
    .Attr("T: {bool, uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}")
    .Attr("call: string")
    .Attr("process_set: int")
    .Output("received: T")
    .Output("received_splits: int32")
    .SetShapeFn([](InferenceContext* context) {
      tf::shape_inference::ShapeHandle shape = context->input(0);
      if (context->RankKnown(shape) && context->Rank(shape) > 0) {
        TF_RETURN_IF_ERROR(context->ReplaceDim(shape, 0, context->UnknownDim(), &shape));
      }
      context->set_output(0, shape);
      context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
      return absl::Status();
    });
REGISTER_KERNEL_BUILDER(Name("HvpipeNamedAlltoall").Device(tf::DEVICE_CPU), NamedOp<Kind::kAlltoall>);

REGISTER_OP("HvpipeNamedReducescatter")
    .Input("tensors: Ts")
    .Input("factors: double")
    .Attr("Ts: list({uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}) >= 1")
    .Attr("call: string")
    .Attr("process_set: int")
    .Attr("reduce_op: int")
    .Output("scattered: Ts")
    .SetShapeFn(OtherRows);
REGISTER_KERNEL_BUILDER(Name("HvpipeNamedReducescatter").Device(tf::DEVICE_CPU),
                        NamedOp<Kind::kReducescatter>);

// Passes on the factors before and after a reduction.
REGISTER_OP("HvpipeFactors")
    .Input("factors: double")
    .Output("same: double")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnchangedShape);

class FactorsOp : public tf::OpKernel {
 public:
  using tf::OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeFactors").Device(tf::DEVICE_CPU), FactorsOp);

// A number that may change between two runs of a graph, because init() may run again.
REGISTER_OP("HvpipeWorld")
    .Attr("what: {'rank', 'size', 'local_rank', 'local_size', 'included'}")
    .Attr("process_set: int")
    .Output("number: int32")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::ScalarShape);

class WorldOp : public tf::OpKernel {
 public:
  explicit WorldOp(tf::OpKernelConstruction* construction) : tf::OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("what", &what_));
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set", &set_));
  }

  void Compute(tf::OpKernelContext* context) override {
    const auto calls = named::DefaultCalls();
    OP_REQUIRES(context, calls != nullptr,
                absl::FailedPreconditionError("hvpipe is not initialised: call init() first."));
    const std::vector<int> ranks = calls->RanksOf(set_);
    OP_REQUIRES(
        context, !ranks.empty(),
        absl::InvalidArgumentError("Unknown process set. Received: process set " + std::to_string(set_)));
    int number = calls->rank();
    if (what_ == "size") number = static_cast<int>(ranks.size());
    if (what_ == "local_rank") number = calls->local_rank;
    if (what_ == "local_size") number = calls->local_size;
    if (what_ == "included") {
      number = std::count(ranks.begin(), ranks.end(), calls->rank()) > 0 ? 1 : 0;
    }
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tf::TensorShape(), &output));
    output->scalar<std::int32_t>()() = number;
  }

 private:
  std::string what_;
  int set_ = 0;
};
REGISTER_KERNEL_BUILDER(Name("HvpipeWorld").Device(tf::DEVICE_CPU), WorldOp);

}  // namespace
}  // namespace hvpipe
