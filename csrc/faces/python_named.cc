// The service for named collectives, as Python opens and closes it. TensorFlow's kernels make most calls.
#include <memory>
#include <string>
#include <vector>

#include "faces/python.h"
#include "named/named_calls.h"

namespace hvpipe::python {
namespace {

using named::Call;
using named::CallError;
using named::Kind;
using named::NamedCalls;
using named::Problem;
using named::Response;

std::shared_ptr<NamedCalls> MakeNamedCalls(std::optional<int> fortran_handle, double timeout_s,
                                           int local_rank, int local_size) {
  const nb::gil_scoped_release release;
  const MPI_Comm world = fortran_handle ? MPI_Comm_f2c(*fortran_handle) : MPI_COMM_NULL;
  auto calls = std::make_shared<NamedCalls>(world, timeout_s);
  calls->local_rank = local_rank;
  calls->local_size = local_size;
  return calls;
}

ErrorKind KindOf(Problem problem) {
  switch (problem) {
    case Problem::kMismatch:
      return ErrorKind::kMismatch;
    case Problem::kDeadline:
      return ErrorKind::kDeadline;
    case Problem::kPeer:
      return ErrorKind::kPeer;
    default:
      return ErrorKind::kUsage;
  }
}

Response Run(NamedCalls& calls, Kind kind, const std::string& name, int set,
             const std::vector<std::int64_t>& ranks, int number) {
  const nb::gil_scoped_release release;
  Call call;
  call.request.kind = kind;
  call.request.name = name;
  call.request.set = set;
  call.request.splits = ranks;
  call.request.root = number;
  try {
    return calls.Run(std::move(call), CheckSignals);
  } catch (const CallError& error) {
    throw Error(error.message, KindOf(error.problem));
  }
}

}  // namespace

void BindNamedCalls(nb::module_& module) {
  nb::class_<NamedCalls>(module, "NamedCalls")
      .def_static("create", &MakeNamedCalls, nb::arg("fortran_handle").none(), nb::arg("timeout_s"),
                  nb::arg("local_rank"), nb::arg("local_size"))
      .def(
          "barrier",
          [](NamedCalls& self, const std::string& name, int process_set) {
            (void)Run(self, Kind::kBarrier, name, process_set, {}, 0);
          },
          nb::arg("name"), nb::arg("process_set"))
      .def("join", [](NamedCalls& self) { return Run(self, Kind::kJoin, "join", 0, {}, 0).number; })
      .def(
          "add_set",
          [](NamedCalls& self, const std::vector<std::int64_t>& ranks) {
            return Run(self, Kind::kAddSet, "add_process_set", 0, ranks, 0).number;
          },
          nb::arg("ranks"))
      .def(
          "remove_set",
          [](NamedCalls& self, int number) {
            return Run(self, Kind::kRemoveSet, "remove_process_set", 0, {}, number).number >= 0;
          },
          nb::arg("number"))
      .def("ranks_of", &NamedCalls::RanksOf, nb::arg("process_set"))
      .def("sets", &NamedCalls::Sets)
      .def("leave", &NamedCalls::Leave, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &NamedCalls::Stop, nb::call_guard<nb::gil_scoped_release>());
  module.def("set_default_named_calls", &named::SetDefaultNamedCalls, nb::arg("calls").none());
}

}  // namespace hvpipe::python
