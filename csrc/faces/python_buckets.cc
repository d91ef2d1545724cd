// Gradient buckets, as Python calls them.
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "faces/python.h"

namespace hvpipe::python {
namespace {

using BucketSpec =
    std::tuple<std::string, std::string, std::string, std::vector<std::size_t>, int, std::size_t>;

void AddPlan(Engine& engine, int number, const std::string& name, std::uint64_t signature,
             const std::vector<BucketSpec>& buckets, bool on_device) {
  std::vector<BucketLayout> layouts;
  for (const auto& [bucket, dtype, wire, counts, priority, row] : buckets) {
    layouts.emplace_back(bucket, ParseDType(dtype), ParseDType(wire), counts, priority);
    layouts.back().row = row;
  }
  const auto memory = on_device ? Memory::kDevice : Memory::kHost;
  const nb::gil_scoped_release release;  // allocating waits for the device
  engine.buckets().AddPlan(number, name, signature, std::move(layouts), memory);
}

std::tuple<double, double> BeginStep(Engine& engine, int plan, std::int64_t step, double samples,
                                     bool reduces) {
  const nb::gil_scoped_release release;
  // Shared, because an interrupted wait returns before the callback runs.
  auto waiter = std::make_shared<Waiter>();
  auto outcome = std::make_shared<std::pair<double, double>>();
  engine.buckets().BeginStep(plan, step, samples, reduces,
                             [=](const Error* error, double scale, double total) {
                               *outcome = {scale, total};
                               waiter->Set(error);
                             });
  waiter->Wait();
  return {outcome->first, outcome->second};
}

void CheckSizes(const BucketLayout& layout, const std::vector<std::size_t>& bytes) {
  const std::size_t element = SizeOf(layout.tensor_type);
  bool same = bytes.size() == layout.counts.size();
  for (std::size_t i = 0; same && i < bytes.size(); ++i) same = bytes[i] == layout.counts[i] * element;
  if (!same) {
    throw Error(
        "Expected the tensors of bucket " + layout.name + ". Received: tensors of other sizes or number",
        ErrorKind::kUsage);
  }
}

void Submit(Engine& engine, int plan, int bucket, const std::vector<InArray>& tensors, double scale) {
  std::vector<const void*> pointers;
  std::vector<std::size_t> bytes;
  for (const InArray& tensor : tensors) {
    pointers.push_back(tensor.data());
    bytes.push_back(tensor.nbytes());
  }
  CheckSizes(engine.buckets().layout(plan, bucket), bytes);
  const nb::gil_scoped_release release;
  engine.buckets().Submit(plan, bucket, pointers, scale);
}

void Collect(Engine& engine, int plan, int bucket, const std::vector<OutArray>& tensors) {
  std::vector<void*> pointers;
  std::vector<std::size_t> bytes;
  for (const OutArray& tensor : tensors) {
    pointers.push_back(tensor.data());
    bytes.push_back(tensor.nbytes());
  }
  CheckSizes(engine.buckets().layout(plan, bucket), bytes);
  const nb::gil_scoped_release release;
  auto waiter = std::make_shared<Waiter>();
  engine.buckets().Collect(plan, bucket, [=](const Error* error) { waiter->Set(error); });
  waiter->Wait();
  engine.buckets().Unpack(plan, bucket, pointers);
}

using DeviceTensors = std::vector<std::pair<Address, std::size_t>>;

template <typename Pointer>
std::vector<Pointer> PointersOf(const BucketLayout& layout, const DeviceTensors& tensors) {
  std::vector<Pointer> pointers;
  std::vector<std::size_t> bytes;
  for (const auto& [address, size] : tensors) {
    pointers.push_back(reinterpret_cast<Pointer>(address));
    bytes.push_back(size);
  }
  CheckSizes(layout, bytes);
  return pointers;
}

void SubmitDevice(Engine& engine, int plan, int bucket, const DeviceTensors& tensors, double scale,
                  Address stream) {
  const auto pointers = PointersOf<const void*>(engine.buckets().layout(plan, bucket), tensors);
  const nb::gil_scoped_release release;
  engine.buckets().SubmitDevice(plan, bucket, pointers, scale, reinterpret_cast<void*>(stream));
}

void CollectDevice(Engine& engine, int plan, int bucket, const DeviceTensors& tensors, Address stream,
                   bool on_stream) {
  const auto pointers = PointersOf<void*>(engine.buckets().layout(plan, bucket), tensors);
  const nb::gil_scoped_release release;
  auto waiter = std::make_shared<Waiter>();
  engine.buckets().Collect(plan, bucket, [=](const Error* error) { waiter->Set(error); }, on_stream);
  waiter->Wait();
  engine.buckets().UnpackDevice(plan, bucket, pointers, reinterpret_cast<void*>(stream));
}

}  // namespace

void BindBuckets(EngineClass& engine) {
  engine
      .def("add_plan", &AddPlan, nb::arg("number"), nb::arg("name"), nb::arg("signature"), nb::arg("buckets"),
           nb::arg("on_device") = false)
      .def(
          "remove_plan", [](Engine& self, int plan) { self.buckets().RemovePlan(plan); }, nb::arg("plan"),
          nb::call_guard<nb::gil_scoped_release>())
      .def("begin_step", &BeginStep, nb::arg("plan"), nb::arg("step"), nb::arg("samples"), nb::arg("reduces"))
      .def("submit", &Submit, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"), nb::arg("scale"))
      .def("collect", &Collect, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"))
      .def("submit_device", &SubmitDevice, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"),
           nb::arg("scale"), nb::arg("stream"))
      .def("collect_device", &CollectDevice, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"),
           nb::arg("stream"), nb::arg("on_stream") = false);
}

}  // namespace hvpipe::python
