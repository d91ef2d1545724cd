// The Python module _engine: the class Engine, waiting, and exceptions.
#include "faces/python.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/exit_timer.h"
#include "base/stack_dump.h"
#include "progress/mpi_network.h"
#include "progress/socket_network.h"

namespace hvpipe::python {

void CheckSignals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void Waiter::Set(const Error* error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error != nullptr) error_ = *error;
  set_ = true;
  changed_.notify_all();
}

bool Waiter::set() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

bool Waiter::set_without_error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return set_ && !error_;
}

void Waiter::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return set_; })) {
    lock.unlock();
    CheckSignals();
    lock.lock();
  }
  if (error_) throw *error_;
}

namespace {

// By the names of EngineOptions' members; Settings.engine_options has them.
EngineOptions OptionsOf(const nb::kwargs& given) {
  EngineOptions options;
  std::size_t taken = 0;
  const auto take = [&](const char* name, auto& member) {
    if (!given.contains(name)) return;
    member = nb::cast<std::decay_t<decltype(member)>>(given[name]);
    ++taken;
  };
  take("timeout_s", options.timeout_s);
  take("first_steps_timeout_s", options.first_steps_timeout_s);
  take("segment_bytes", options.segment_bytes);
  take("fast_network", options.fast_network);
  take("messages_in_flight", options.messages_in_flight);
  take("slot_bytes", options.slot_bytes);
  take("shared_memory", options.shared_memory);
  take("ranks_per_host", options.ranks_per_host);
  take("trace", options.trace);
  take("stall_warn_s", options.stall_warn_s);
  take("flight_path", options.flight_path);
  take("abort_marker", options.abort_marker);
  std::vector<std::pair<std::string, std::size_t>> algorithms;
  take("algorithms", algorithms);
  take("algorithms_ranks", options.algorithms_ranks);
  for (const auto& [name, most_bytes] : algorithms)
    options.algorithms.push_back({ParseAlgorithm(name), most_bytes});
  if (taken != given.size()) throw Error("internal: an option of the engine has another name");
  // Any eager limit is possible, but counts of MPI are ints.
  options.segment_bytes = std::clamp<std::size_t>(options.segment_bytes, 64, std::size_t{1} << 30);
  return options;
}

// MPI connects the ranks.
std::shared_ptr<Engine> MakeEngine(int fortran_handle, const nb::kwargs& given) {
  const EngineOptions options = OptionsOf(given);
  const nb::gil_scoped_release release;
  return std::make_shared<Engine>(OverMpi(MPI_Comm_f2c(fortran_handle)), options);
}

// TCP connects the ranks.
std::shared_ptr<Engine> MakeEngineOverSockets(std::shared_ptr<SocketMesh> mesh, const std::vector<int>& hosts,
                                              const std::string& shared_file, const nb::kwargs& given) {
  const EngineOptions options = OptionsOf(given);
  const nb::gil_scoped_release release;
  return std::make_shared<Engine>(OverSockets(std::move(mesh), {hosts, shared_file}), options);
}

nb::dict CountersOf(const Engine& engine) {
  const Counters counters = engine.counters();
  nb::dict result;
  result["network_bytes_sent"] = counters.network_bytes_sent.value();
  result["network_bytes_received"] = counters.network_bytes_received.value();
  result["shared_memory_bytes"] = counters.shared_memory_bytes.value();
  result["messages_sent"] = counters.messages_sent.value();
  result["operations"] = counters.operations.value();
  result["steps"] = counters.steps.value();
  result["sleeps"] = counters.sleeps.value();
  result["exposed_wait_s"] = counters.exposed_wait_s.value();
  result["events_dropped"] = engine.log().dropped();
  return result;
}

std::vector<std::tuple<std::string, std::string, double, double>> TakeEvents(Engine& engine) {
  std::vector<std::tuple<std::string, std::string, double, double>> events;
  for (const auto& event : engine.log().Take()) {
    events.emplace_back(event.category, event.name, event.start_s, event.end_s);
  }
  return events;
}

// In a child of fork(): keep an object of the parent until the process ends. Its destructor would wait for
// threads that the child lacks.
void LeaveToParent(const nb::object& object) {
  nb::set_leak_warnings(false);
  object.inc_ref();
}

void TranslateError(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const char* name = "HvpipeError";
    if (error.kind() == ErrorKind::kMismatch) name = "MismatchError";
    if (error.kind() == ErrorKind::kDeadline) name = "DeadlineError";
    if (error.kind() == ErrorKind::kPeer || error.kind() == ErrorKind::kLost) name = "PeerError";
    const nb::object type = nb::module_::import_("hvpipe.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
  }
}

void BindEngine(EngineClass& engine) {
  const auto topology = [&engine](const char* name, int Topology::*member) {
    engine.def_prop_ro(name, [member](const Engine& self) { return self.topology().*member; });
  };
  topology("rank", &Topology::rank);
  topology("size", &Topology::size);
  topology("local_rank", &Topology::local_rank);
  topology("local_size", &Topology::local_size);
  topology("hosts", &Topology::hosts);
  engine.def_static("create", &MakeEngine, nb::arg("fortran_handle"), nb::arg("options"))
      .def_static("create_over_sockets", &MakeEngineOverSockets, nb::arg("mesh"), nb::arg("hosts"),
                  nb::arg("shared_file"), nb::arg("options"))
      .def(
          "fail",
          [](Engine& self, const std::string& message) {
            const nb::gil_scoped_release release;
            self.Fail(Error(message, ErrorKind::kUsage));
          },
          nb::arg("message"))
      .def(
          "note_step",
          [](Engine& self, const std::string& name, std::uint64_t step) {
            self.flight().Add(Flight::kStep, name, step);
          },
          nb::arg("name"), nb::arg("step"))
      .def(
          "end", [](Engine& self, const std::string& why) { self.flight().End(why); }, nb::arg("why"))
      .def(
          "tell_rank_0",
          [](Engine& self, std::string status) { self.watchdog().TellRank0(std::move(status)); },
          nb::arg("status"))
      .def("take_statuses",
           [](Engine& self) {
             nb::list taken;
             for (const auto& text : self.watchdog().TakeStatuses())
               taken.append(nb::bytes(text.data(), text.size()));
             return taken;
           })
      .def("watch", &Engine::Watch, nb::arg("on"))
      .def("mark_signals", [](Engine& self) { self.flight().MarkSignals(); })
      .def(
          "use_stacks", [](Engine& self, int number, int file) { self.watchdog().UseStacks(number, file); },
          nb::arg("signal"), nb::arg("file"))
      .def(
          "lose_peer",
          [](Engine& self, const std::string& message) {
            const nb::gil_scoped_release release;
            self.Fail(Error(message, ErrorKind::kPeer));
          },
          nb::arg("message"))
      .def("stop", &Engine::Stop, nb::call_guard<nb::gil_scoped_release>())
      .def("set_requests", [](Engine& self, std::uint64_t bits) { self.agreement().SetRequests(bits); })
      .def("requests", [](Engine& self) { return self.agreement().requests(); })
      .def("end_first_steps", &Engine::EndFirstSteps)
      .def("counters", &CountersOf)
      .def("take_events", &TakeEvents)
      .def(
          "log",
          [](Engine& self, const std::string& category, const std::string& name, double start_s,
             double end_s) { self.log().Add(category, name, start_s, end_s); },
          nb::arg("category"), nb::arg("name"), nb::arg("start_s"), nb::arg("end_s"));
}

}  // namespace
}  // namespace hvpipe::python

NB_MODULE(_engine, m) {
  using namespace hvpipe::python;
  nb::register_exception_translator(TranslateError);
  BindSockets(m);
  // A session keeps some objects until the process ends: freeing them could wait for a lost rank.
  nb::set_leak_warnings(false);
  EngineClass engine(m, "Engine");
  BindEngine(engine);
  BindBuckets(engine);
  BindCollectives(engine);
  BindMessages(m, engine);
  BindNamedCalls(m);
  BindArrays(m);
  m.def("set_default", &hvpipe::SetDefaultEngine, nb::arg("engine").none());
  m.def("leave_to_parent", &LeaveToParent, nb::arg("object"));
  m.def("fail_at_exit", &hvpipe::FailAtExit);
  m.def("now", &hvpipe::Now);
  m.def(
      "handle_in_copy",
      [](int number, int limit_ms) {
        const nb::gil_scoped_release release;
        return hvpipe::HandleInCopy(number, std::chrono::milliseconds(limit_ms));
      },
      nb::arg("signal"), nb::arg("limit_ms"));
  nb::class_<hvpipe::ExitTimer>(m, "ExitTimer")
      .def(nb::init<double, std::string, std::string>(), nb::arg("limit_s"), nb::arg("message"),
           nb::arg("abort_marker"));
  m.def("count_devices", &hvpipe::CountDevices, nb::arg("library"));
}
