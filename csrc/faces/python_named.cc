// Collectives by name, as Python opens and closes them. TensorFlow's kernels make most calls.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "faces/python.h"
#include "named/mpi_links.h"
#include "named/named_calls.h"
#include "named/socket_links.h"

namespace hvpipe::python {
namespace {

using named::Call;
using named::CallError;
using named::Kind;
using named::NamedCalls;
using named::Problem;
using named::Response;

std::shared_ptr<NamedCalls> Make(std::unique_ptr<named::Links> links, double timeout_s, int local_rank,
                                 int local_size) {
  auto calls = std::make_shared<NamedCalls>(std::move(links), timeout_s);
  calls->local_rank = local_rank;
  calls->local_size = local_size;
  return calls;
}

std::shared_ptr<NamedCalls> MakeOverMpi(std::optional<int> fortran_handle, double timeout_s, int local_rank,
                                        int local_size) {
  const nb::gil_scoped_release release;
  auto links = fortran_handle ? named::MakeMpiLinks(MPI_Comm_f2c(*fortran_handle)) : nullptr;
  return Make(std::move(links), timeout_s, local_rank, local_size);
}

std::shared_ptr<NamedCalls> MakeOverSockets(std::shared_ptr<SocketMesh> mesh, double timeout_s,
                                            int local_rank, int local_size) {
  const nb::gil_scoped_release release;
  return Make(named::MakeSocketLinks(std::move(mesh), timeout_s), timeout_s, local_rank, local_size);
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
      .def_static("create", &MakeOverMpi, nb::arg("fortran_handle").none(), nb::arg("timeout_s"),
                  nb::arg("local_rank"), nb::arg("local_size"))
      .def_static("create_over_sockets", &MakeOverSockets, nb::arg("mesh"), nb::arg("timeout_s"),
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
      .def("watch_with", &NamedCalls::WatchWith, nb::arg("engine"), nb::arg("warn_s"), nb::arg("sign"))
      .def("ranks_of", &NamedCalls::RanksOf, nb::arg("process_set"), nb::call_guard<nb::gil_scoped_release>())
      .def("set_of", &NamedCalls::SetOf, nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>())
      .def("leave", &NamedCalls::Leave, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &NamedCalls::Stop, nb::call_guard<nb::gil_scoped_release>());
  module.def("set_default_named_calls", &named::SetDefaultCalls, nb::arg("calls").none());
}

}  // namespace hvpipe::python
