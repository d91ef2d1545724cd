// TensorFlow kernels of compression "int8" on the CPU: first phase, second phase, decoding. Stateless.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "base/int8_compression.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvpipe {
namespace {

namespace tf = ::tensorflow;
using tf::shape_inference::InferenceContext;

constexpr std::int64_t kCyclesPerNumber = 2;

// Blocks of a tensor: all have `size` numbers, except the last one, which may have fewer.
class Blocks {
 public:
  Blocks(std::int64_t count, std::int64_t size) : count_(count), size_(size) {}

  std::int64_t number() const { return (count_ + size_ - 1) / size_; }

  // Call `work(block, first number, how many)` for each block, on the threads of this operation.
  template <typename Work>
  void ForEach(tf::OpKernelContext* context, const Work& work) const {
    const auto some = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        const std::int64_t first = block * size_;
        work(block, first, static_cast<std::size_t>(std::min(size_, count_ - first)));
      }
    };
// TensorFlow 2.18 has no other.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    context->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(number(),
                                                                             kCyclesPerNumber * size_, some);
#pragma GCC diagnostic pop
  }

 private:
  std::int64_t count_, size_;
};

// Common to the three: the attribute `block`.
class Int8Op : public tf::OpKernel {
 public:
  explicit Int8Op(tf::OpKernelConstruction* construction) : tf::OpKernel(construction) {
    std::int64_t block = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("block", &block));
    block_ = block;
  }

 protected:
  Blocks BlocksOf(const tf::Tensor& tensor) const { return Blocks(tensor.NumElements(), block_); }

  static absl::Status WrongSize(const char* what, const tf::Tensor& tensor) {
    return absl::InvalidArgumentError(
        std::string(what) + " should fit the gradient. Received: shape=" + tensor.shape().DebugString());
  }

 private:
  std::int64_t block_ = 1;
};

// The gradient's shape may be unknown while the graph is made; the error's is not.
absl::Status BlocksShape(InferenceContext* context) {
  std::int64_t block = 1;
  TF_RETURN_IF_ERROR(context->GetAttr("block", &block));
  tf::shape_inference::ShapeHandle share, gradient;
  TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 0, &share));
  TF_RETURN_IF_ERROR(context->Merge(context->input(0), context->input(2), &gradient));
  const auto count = context->NumElements(gradient);
  const bool known = context->ValueKnown(count);
  const auto blocks =
      known ? context->MakeDim((context->Value(count) + block - 1) / block) : context->UnknownDim();
  context->set_output(0, gradient);
  context->set_output(1, context->Vector(blocks));
  return absl::Status();
}

REGISTER_OP("HvpipeInt8First")
    .Input("gradient: float")
    .Input("share: float")
    .Input("error: float")
    .Attr("block: int >= 1")
    .Output("given: float")
    .Output("maxima: float")
    .SetShapeFn(BlocksShape);

class Int8FirstOp : public Int8Op {
 public:
  using Int8Op::Int8Op;

  void Compute(tf::OpKernelContext* context) override {
    const tf::Tensor& gradient = context->input(0);
    const tf::Tensor& error = context->input(2);
    OP_REQUIRES(context, error.NumElements() == gradient.NumElements(), WrongSize("The error", error));
    OP_REQUIRES(context, context->input(1).NumElements() == 1, WrongSize("The share", context->input(1)));
    const Blocks blocks = BlocksOf(gradient);
    tf::Tensor *given = nullptr, *maxima = nullptr;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({0}, 0, gradient.shape(), &given));
    OP_REQUIRES_OK(context, context->allocate_output(1, tf::TensorShape({blocks.number()}), &maxima));
    const float share = context->input(1).flat<float>()(0);
    const float* from = gradient.flat<float>().data();
    const float* left = error.flat<float>().data();
    float* to = given->flat<float>().data();
    float* largest = maxima->flat<float>().data();
    blocks.ForEach(context, [=](std::int64_t block, std::int64_t first, std::size_t count) {
      Int8First(from + first, share, left + first, count, to + first, largest + block);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeInt8First").Device(tf::DEVICE_CPU), Int8FirstOp);

REGISTER_OP("HvpipeInt8Second")
    .Input("given: float")
    .Input("totals: float")
    .Attr("block: int >= 1")
    .Attr("steps: float")
    .Output("bytes: int8")
    .Output("scales: float")
    .Output("error: float")
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->input(0));
      context->set_output(1, context->input(1));
      context->set_output(2, context->input(0));
      return absl::Status();
    });

class Int8SecondOp : public Int8Op {
 public:
  explicit Int8SecondOp(tf::OpKernelConstruction* construction) : Int8Op(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("steps", &steps_));
  }

  void Compute(tf::OpKernelContext* context) override {
    const tf::Tensor& given = context->input(0);
    const tf::Tensor& totals = context->input(1);
    const Blocks blocks = BlocksOf(given);
    OP_REQUIRES(context, totals.NumElements() == blocks.number(), WrongSize("Totals", totals));
    tf::Tensor *bytes = nullptr, *scales = nullptr, *error = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, given.shape(), &bytes));
    OP_REQUIRES_OK(context, context->allocate_output(1, totals.shape(), &scales));
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({0}, 2, given.shape(), &error));
    const float* total = totals.flat<float>().data();
    float* scale = scales->flat<float>().data();
    bool finite = true;
    for (std::int64_t block = 0; block < blocks.number(); ++block) {
      finite = finite && std::isfinite(total[block]);
      scale[block] = total[block] / steps_;
    }
    const float* from = given.flat<float>().data();
    std::int8_t* to = bytes->flat<std::int8_t>().data();
    float* left = error->flat<float>().data();
    blocks.ForEach(context, [=](std::int64_t block, std::int64_t first, std::size_t count) {
      Int8Second(from + first, scale[block], count, to + first, left + first);
      // An error that is not finite would stay so.
      if (!finite) std::fill_n(left + first, count, 0.0F);
    });
  }

 private:
  float steps_ = 1;
};
REGISTER_KERNEL_BUILDER(Name("HvpipeInt8Second").Device(tf::DEVICE_CPU), Int8SecondOp);

REGISTER_OP("HvpipeInt8Decode")
    .Input("sums: int8")
    .Input("scales: float")
    .Attr("block: int >= 1")
    .Output("gradient: float")
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->input(0));
      return absl::Status();
    });

class Int8DecodeOp : public Int8Op {
 public:
  using Int8Op::Int8Op;

  void Compute(tf::OpKernelContext* context) override {
    const tf::Tensor& sums = context->input(0);
    const tf::Tensor& scales = context->input(1);
    const Blocks blocks = BlocksOf(sums);
    OP_REQUIRES(context, scales.NumElements() == blocks.number(), WrongSize("Scales", scales));
    tf::Tensor* gradient = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, sums.shape(), &gradient));
    const std::int8_t* from = sums.flat<std::int8_t>().data();
    const float* scale = scales.flat<float>().data();
    float* to = gradient->flat<float>().data();
    blocks.ForEach(context, [=](std::int64_t block, std::int64_t first, std::size_t count) {
      Int8Decode(from + first, scale[block], count, to + first);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("HvpipeInt8Decode").Device(tf::DEVICE_CPU), Int8DecodeOp);

}  // namespace
}  // namespace hvpipe
