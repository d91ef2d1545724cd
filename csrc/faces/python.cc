// The Python module _engine: the class Engine, waiting, and exceptions.
#include "faces/python.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
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

// The options that do not depend on what connects the ranks.
EngineOptions OptionsOf(double timeout_s, double first_step_timeout_s, std::size_t segment_bytes,
                        int messages_in_flight, std::size_t slot_bytes, bool trace, double stall_warn_s,
                        const std::string& flight_path, const std::string& abort_marker) {
  EngineOptions options;
  options.timeout_s = timeout_s;
  options.first_steps_timeout_s = first_step_timeout_s;
  // Any eager limit is possible, but counts of MPI are ints.
  options.segment_bytes = std::clamp<std::size_t>(segment_bytes, 64, std::size_t{1} << 30);
  options.messages_in_flight = messages_in_flight;
  options.slot_bytes = slot_bytes;
  options.trace = trace;
  options.stall_warn_s = stall_warn_s;
  options.flight_path = flight_path;
  options.abort_marker = abort_marker;
  return options;
}

// MPI connects the ranks.
std::shared_ptr<Engine> MakeEngine(int fortran_handle, double timeout_s, double first_step_timeout_s,
                                   std::size_t segment_bytes, int messages_in_flight, std::size_t slot_bytes,
                                   bool shared_memory, int ranks_per_host, bool trace, double stall_warn_s,
                                   const std::string& flight_path, const std::string& abort_marker) {
  EngineOptions options = OptionsOf(timeout_s, first_step_timeout_s, segment_bytes, messages_in_flight,
                                    slot_bytes, trace, stall_warn_s, flight_path, abort_marker);
  options.shared_memory = shared_memory;
  options.ranks_per_host = ranks_per_host;
  const nb::gil_scoped_release release;
  return std::make_shared<Engine>(OverMpi(MPI_Comm_f2c(fortran_handle)), options);
}

// TCP connects the ranks.
std::shared_ptr<Engine> MakeEngineOverSockets(std::shared_ptr<SocketMesh> mesh, const std::vector<int>& hosts,
                                              const std::string& shared_file, double timeout_s,
                                              double first_step_timeout_s, std::size_t segment_bytes,
                                              int messages_in_flight, std::size_t slot_bytes, bool trace,
                                              double stall_warn_s, const std::string& flight_path,
                                              const std::string& abort_marker) {
  const EngineOptions options = OptionsOf(timeout_s, first_step_timeout_s, segment_bytes, messages_in_flight,
                                          slot_bytes, trace, stall_warn_s, flight_path, abort_marker);
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
  engine
      .def_static("create", &MakeEngine, nb::arg("fortran_handle"), nb::kw_only(), nb::arg("timeout_s"),
                  nb::arg("first_step_timeout_s") = 0.0, nb::arg("segment_bytes"),
                  nb::arg("messages_in_flight"), nb::arg("slot_bytes"), nb::arg("shared_memory"),
                  nb::arg("ranks_per_host"), nb::arg("trace"), nb::arg("stall_warn_s") = 0.0,
                  nb::arg("flight_path") = "", nb::arg("abort_marker") = "")
      .def_static("create_over_sockets", &MakeEngineOverSockets, nb::arg("mesh"), nb::kw_only(),
                  nb::arg("hosts"), nb::arg("shared_file"), nb::arg("timeout_s"),
                  nb::arg("first_step_timeout_s") = 0.0, nb::arg("segment_bytes"),
                  nb::arg("messages_in_flight"), nb::arg("slot_bytes"), nb::arg("trace"),
                  nb::arg("stall_warn_s") = 0.0, nb::arg("flight_path") = "", nb::arg("abort_marker") = "")
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
