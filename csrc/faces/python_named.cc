// Collectives by name, as Python opens and closes them. TensorFlow's kernels make most calls.
#include <memory>
#include <string>
#include <utility>

#include "faces/python.h"
#include "named/named_calls.h"

namespace hvpipe::python {
namespace {

using named::Call;
using named::Kind;
using named::NamedCalls;
using named::Response;

// Those of an engine, which they keep alive; without one, those of a rank that is alone.
std::shared_ptr<NamedCalls> CallsOf(const std::shared_ptr<Engine>& engine, int local_rank, int local_size) {
  auto calls =
      engine ? std::shared_ptr<NamedCalls>(engine, &engine->named_calls()) : std::make_shared<NamedCalls>();
  calls->local_rank = local_rank;
  calls->local_size = local_size;
  return calls;
}

Response Run(NamedCalls& calls, Kind kind, const std::string& name, int set, int number) {
  const nb::gil_scoped_release release;
  Call call;
  call.request.kind = kind;
  call.request.name = name;
  call.request.set = set;
  call.request.root = number;
  return calls.Run(std::move(call), CheckSignals);
}

}  // namespace

void BindNamedCalls(nb::module_& module) {
  nb::class_<NamedCalls>(module, "NamedCalls")
      .def_static("create", &CallsOf, nb::arg("engine").none(), nb::arg("local_rank"), nb::arg("local_size"))
      .def(
          "barrier",
          [](NamedCalls& self, const std::string& name, int process_set) {
            (void)Run(self, Kind::kBarrier, name, process_set, 0);
          },
          nb::arg("name"), nb::arg("process_set"))
      .def("join", [](NamedCalls& self) { return Run(self, Kind::kJoin, "join", 0, 0).number; })
      .def(
          "add_set",
          [](NamedCalls& self, const std::vector<std::int64_t>& ranks) {
            const nb::gil_scoped_release release;
            return self.AddSet(ranks, CheckSignals);
          },
          nb::arg("ranks"))
      .def(
          "remove_set",
          [](NamedCalls& self, int number) {
            return Run(self, Kind::kRemoveSet, "remove_process_set", 0, number).number >= 0;
          },
          nb::arg("number"))
      .def("ranks_of", &NamedCalls::RanksOf, nb::arg("process_set"), nb::call_guard<nb::gil_scoped_release>())
      .def("set_of", &NamedCalls::SetOf, nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>())
      .def("leave", &NamedCalls::Leave, nb::call_guard<nb::gil_scoped_release>());
  module.def("set_default_named_calls", &named::SetDefaultCalls, nb::arg("calls").none());
}

}  // namespace hvpipe::python
