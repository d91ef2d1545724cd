// The services for named collectives, as Python opens and closes them. TensorFlow's kernels make most calls.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "faces/python.h"
#include "named/named_calls.h"
#include "named/queued_calls.h"

namespace hvpipe::python {
namespace {

using named::Call;
using named::CallError;
using named::CallService;
using named::Kind;
using named::NamedCalls;
using named::Problem;
using named::QueuedCalls;
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

Response Run(CallService& calls, Kind kind, const std::string& name, int set,
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

std::shared_ptr<QueuedCalls> MakeQueuedCalls(int rank, int size, int local_rank, int local_size) {
  auto calls = std::make_shared<QueuedCalls>(rank, size);
  calls->local_rank = local_rank;
  calls->local_size = local_size;
  return calls;
}

// A call that Python has taken from the queue.
struct TakenCall {
  std::shared_ptr<QueuedCalls> queue;
  std::unique_ptr<Call> call;

  const named::Request& request() const { return call->request; }
  const named::TensorSpec& tensor(std::size_t index) const { return request().tensors.at(index); }
};

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::device::cpu>;

std::optional<TakenCall> Take(const std::shared_ptr<QueuedCalls>& queue) {
  const nb::gil_scoped_release release;
  auto call = queue->Take();
  if (call == nullptr) return std::nullopt;
  return TakenCall{queue, std::move(call)};
}

// The bytes of an input. They stay valid until the call has ended.
Bytes InputBytes(const TakenCall& taken, std::size_t index) {
  const named::TensorSpec& tensor = taken.tensor(index);
  const auto bytes = static_cast<std::size_t>(tensor.elements()) * SizeOf(tensor.type);
  auto* const data = static_cast<std::uint8_t*>(const_cast<void*>(taken.call->inputs.at(index)));
  return Bytes(data, {bytes}, nb::handle());
}

void SetOutput(const TakenCall& taken, int index, const std::vector<std::int64_t>& shape,
               const InArray& value) {
  const void* const from = value.data();
  const std::size_t bytes = value.nbytes();
  const nb::gil_scoped_release release;
  void* const to = taken.call->allocate(index, shape);
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

void Finish(const TakenCall& taken, int number, const std::vector<std::int64_t>& ranks) {
  const nb::gil_scoped_release release;
  Response response;
  response.kind = taken.request().kind;
  response.name = taken.request().name;
  response.set = taken.request().set;
  response.number = number;
  response.extents = ranks;
  taken.queue->Finish(*taken.call, response);
}

void Fail(const TakenCall& taken, const std::string& message, bool mismatch) {
  const nb::gil_scoped_release release;
  QueuedCalls::Fail(*taken.call, {mismatch ? Problem::kMismatch : Problem::kPeer, message});
}

void BindQueuedCalls(nb::module_& module) {
  nb::class_<TakenCall>(module, "TakenCall")
      .def_prop_ro("kind", [](const TakenCall& taken) { return named::NameOf(taken.request().kind); })
      .def_prop_ro("name", [](const TakenCall& taken) { return taken.request().name; })
      .def_prop_ro("process_set", [](const TakenCall& taken) { return taken.request().set; })
      .def_prop_ro("op", [](const TakenCall& taken) { return named::NameOf(taken.request().op); })
      .def_prop_ro("root", [](const TakenCall& taken) { return taken.request().root; })
      .def_prop_ro("prescale", [](const TakenCall& taken) { return taken.request().prescale; })
      .def_prop_ro("postscale", [](const TakenCall& taken) { return taken.request().postscale; })
      .def_prop_ro("splits", [](const TakenCall& taken) { return taken.request().splits; })
      .def_prop_ro("tensors", [](const TakenCall& taken) { return taken.call->inputs.size(); })
      .def("dtype", [](const TakenCall& taken, std::size_t i) { return named::NameOf(taken.tensor(i).type); })
      .def("shape", [](const TakenCall& taken, std::size_t i) { return taken.tensor(i).shape; })
      .def("input", &InputBytes, nb::arg("index"))
      .def("set_output", &SetOutput, nb::arg("index"), nb::arg("shape"), nb::arg("value"))
      .def("finish", &Finish, nb::arg("number") = 0, nb::arg("ranks") = std::vector<std::int64_t>())
      .def("fail", &Fail, nb::arg("message"), nb::arg("mismatch"));
  nb::class_<QueuedCalls, CallService>(module, "QueuedCalls")
      .def_static("create", &MakeQueuedCalls, nb::arg("rank"), nb::arg("size"), nb::arg("local_rank"),
                  nb::arg("local_size"))
      .def("take", &Take);
}

}  // namespace

void BindNamedCalls(nb::module_& module) {
  nb::class_<CallService>(module, "CallService")
      .def(
          "barrier",
          [](CallService& self, const std::string& name, int process_set) {
            (void)Run(self, Kind::kBarrier, name, process_set, {}, 0);
          },
          nb::arg("name"), nb::arg("process_set"))
      .def("join", [](CallService& self) { return Run(self, Kind::kJoin, "join", 0, {}, 0).number; })
      .def(
          "add_set",
          [](CallService& self, const std::vector<std::int64_t>& ranks) {
            return Run(self, Kind::kAddSet, "add_process_set", 0, ranks, 0).number;
          },
          nb::arg("ranks"))
      .def(
          "remove_set",
          [](CallService& self, int number) {
            return Run(self, Kind::kRemoveSet, "remove_process_set", 0, {}, number).number >= 0;
          },
          nb::arg("number"))
      .def("watch_with", &CallService::WatchWith, nb::arg("engine"), nb::arg("warn_s"), nb::arg("sign"))
      .def("ranks_of", &CallService::RanksOf, nb::arg("process_set"))
      .def("sets", &CallService::Sets)
      .def("leave", &CallService::Leave, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &CallService::Stop, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<NamedCalls, CallService>(module, "NamedCalls")
      .def_static("create", &MakeNamedCalls, nb::arg("fortran_handle").none(), nb::arg("timeout_s"),
                  nb::arg("local_rank"), nb::arg("local_size"));
  BindQueuedCalls(module);
  module.def("set_default_named_calls", &named::SetDefaultCallService, nb::arg("calls").none());
}

}  // namespace hvpipe::python
