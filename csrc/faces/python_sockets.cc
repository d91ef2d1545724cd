// Connections by TCP, as Python opens them, and the objects that it sends over them.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/socket_mesh.h"
#include "collectives/socket_setup.h"
#include "core/event_log.h"
#include "core/socket_network.h"
#include "faces/python.h"

namespace hvpipe::python {
namespace {

constexpr SocketMesh::Channel kObjects = 0;
constexpr double kCloseS = 2;
constexpr double kShortestNapS = 10e-6, kLongestNapS = 1e-3;

using Addresses = std::vector<std::pair<std::string, int>>;

std::shared_ptr<SocketMesh> ConnectMesh(const SocketListener& listener, int rank, const Addresses& addresses,
                                        const std::string& token, double limit_s) {
  std::vector<SocketAddress> listeners;
  for (const auto& [host, port] : addresses) listeners.push_back({host, port});
  const nb::gil_scoped_release release;
  return std::make_shared<SocketMesh>(ConnectSockets(listener, rank, listeners, token, limit_s));
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
  nb::class_<SocketListener>(module, "SocketListener")
      .def(nb::init<const std::string&>(), nb::arg("host"))
      .def_prop_ro("address", [](const SocketListener& listener) {
        return std::make_pair(listener.address().host, listener.address().port);
      });
  nb::class_<SocketMesh>(module, "SocketMesh")
      .def_static("connect", &ConnectMesh, nb::arg("listener"), nb::kw_only(), nb::arg("rank"),
                  nb::arg("addresses"), nb::arg("token"), nb::arg("limit_s"))
      .def("send", &SendObjects, nb::arg("object"), nb::arg("peers"), nb::arg("limit_s"))
      .def("receive", &ReceiveObject, nb::arg("peer"), nb::arg("limit_s"))
      .def("leave_to_parent", &SocketMesh::LeaveToParent)
      .def("close", [](SocketMesh& mesh) { mesh.Close(kCloseS); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("shared_file_bytes", &SharedFileBytes, nb::arg("slot_bytes"), nb::arg("ranks"),
             nb::arg("several_hosts"));
}

}  // namespace hvpipe::python
