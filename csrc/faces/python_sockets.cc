// Connections by TCP, as Python opens them, and the objects that it sends over them.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/event_log.h"
#include "faces/python.h"
#include "progress/socket_network.h"
#include "transport/socket_mesh.h"
#include "transport/socket_setup.h"

namespace hvpipe::python {
namespace {

constexpr SocketMesh::Channel kObjects = 0;
constexpr double kCloseS = 2;
constexpr double kShortestNapS = 10e-6, kLongestNapS = 1e-3;

// A process as bytes that another rank reads.
nb::bytes OwnProcess() {
  const ProcessName own = ProcessName::Own();
  return nb::bytes(reinterpret_cast<const char*>(&own), sizeof own);
}

ProcessName ProcessOf(const nb::bytes& bytes) {
  ProcessName process;
  if (bytes.size() != sizeof process)
    throw Error("A process should have " + std::to_string(sizeof process) +
                    " bytes. Received: " + std::to_string(bytes.size()),
                ErrorKind::kUsage);
  std::memcpy(static_cast<void*>(&process), bytes.c_str(), sizeof process);
  process.host[sizeof process.host - 1] = process.boot[sizeof process.boot - 1] = '\0';
  return process;
}

// Takes over the sockets, by rank; -1 for this rank.
std::shared_ptr<SocketMesh> MeshOver(int rank, const std::vector<int>& sockets,
                                     const std::vector<nb::bytes>& processes) {
  Sockets given{rank, sockets, {}};
  for (const nb::bytes& each : processes) given.processes.push_back(ProcessOf(each));
  for (const int socket : sockets) {
    if (socket >= 0) Tune(socket);
  }
  return std::make_shared<SocketMesh>(given);
}

// Call `ended` until it is true. Throws if no object moves for `limit_s` seconds, or for a signal.
template <typename Ended>
void Await(SocketMesh& mesh, const Ended& ended, double limit_s, const std::string& what) {
  std::uint64_t moved = mesh.Moved(kObjects);
  double deadline_s = Now() + limit_s, nap_s = kShortestNapS, signals_s = 0;
  while (!ended()) {
    const double now_s = Now();
    if (const std::uint64_t now_moved = mesh.Moved(kObjects); now_moved != moved) {
      moved = now_moved;
      deadline_s = now_s + limit_s;
    }
    if (now_s > deadline_s) {
      throw Error("Waited for the " + what + ": every rank should take part within " +
                      std::to_string(static_cast<int>(limit_s)) + " s (HVPIPE_TIMEOUT). Received: nothing",
                  ErrorKind::kDeadline);
    }
    if (now_s - signals_s > 0.05) {
      CheckSignals();
      signals_s = now_s;
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(nap_s));
    nap_s = std::min(nap_s * 1.5, kLongestNapS);
  }
}

void SendObjects(SocketMesh& mesh, const nb::bytes& object, const std::vector<int>& peers, double limit_s) {
  const auto text = std::make_shared<const std::string>(object.c_str(), object.size());
  const nb::gil_scoped_release release;
  for (const int peer : peers) mesh.SendText(text, peer, kObjects, 0);
  Await(mesh, [&] { return mesh.AllWritten(kObjects); }, limit_s, "ranks to take an object");
}

nb::bytes ReceiveObject(SocketMesh& mesh, int peer, double limit_s) {
  std::optional<std::string> text;
  {
    const nb::gil_scoped_release release;
    const auto arrived = [&] { return (text = mesh.TakeTextFrom(peer, kObjects)).has_value(); };
    Await(mesh, arrived, limit_s, "object of rank " + std::to_string(peer));
  }
  return nb::bytes(text->data(), text->size());
}

}  // namespace

void BindSockets(nb::module_& module) {
  nb::class_<SocketMesh>(module, "SocketMesh")
      .def_static("over", &MeshOver, nb::kw_only(), nb::arg("rank"), nb::arg("sockets"), nb::arg("processes"))
      .def("send", &SendObjects, nb::arg("object"), nb::arg("peers"), nb::arg("limit_s"))
      .def("receive", &ReceiveObject, nb::arg("peer"), nb::arg("limit_s"))
      .def("leave_to_parent", &SocketMesh::LeaveToParent)
      .def("close", [](SocketMesh& mesh) { mesh.Close(kCloseS); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("own_process", &OwnProcess);
  module.def("shared_file_bytes", &SharedFileBytes, nb::arg("slot_bytes"), nb::arg("ranks"));
}

}  // namespace hvpipe::python
