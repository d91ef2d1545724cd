// Messages between two ranks and groups of ranks, as Python calls them.
#include <atomic>
#include <memory>
#include <utility>

#include "faces/python.h"

namespace hvpipe::python {
namespace {

// A message or group all-reduce under way. Keeps its array alive until it has ended.
class Request {
 public:
  explicit Request(const Engine& engine)
      : waiter_(std::make_shared<Waiter>()), awaited_(engine.messenger().awaited()) {}
  ~Request() {
    if (source.is_valid() && !waiter_->set_without_error()) LeakArray(source);
  }
  Request(Request&&) = default;
  Request& operator=(Request&&) = delete;
  Done Callback() const {
    return [waiter = waiter_](const Error* error) { waiter->Set(error); };
  }
  bool done() const { return waiter_->set(); }
  void Wait() const {
    struct Counted {
      std::atomic<int>& count;
      explicit Counted(std::atomic<int>& of) : count(of) { ++count; }
      ~Counted() { --count; }
    } const counted(*awaited_);
    waiter_->Wait();
  }

  std::int64_t number = -1;                // of a posted message
  nb::object source;                       // the array sent, or received into
  std::shared_ptr<AlignedBuffer> arrived;  // of a receive

 private:
  std::shared_ptr<Waiter> waiter_;
  std::shared_ptr<std::atomic<int>> awaited_;
};

Request Send(Engine& engine, const InArray& array, int peer, int tag, const std::string& what) {
  Request request(engine);
  request.source = nb::cast(array);
  const void* const data = array.data();
  const std::size_t bytes = array.nbytes();
  const nb::gil_scoped_release release;
  engine.messenger().Send(peer, tag, data, bytes, what, request.Callback());
  return request;
}

Request Receive(Engine& engine, std::size_t bytes, int peer, int tag, const std::string& what) {
  Request request(engine);
  request.arrived = engine.messenger().Receive(peer, tag, bytes, what, request.Callback());
  return request;
}

// The received bytes, in memory that lives as long as the array.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> Arrived(const Request& request) {
  if (!request.arrived)
    throw Error("arrived() should be called on a receive. Received: another request", ErrorKind::kUsage);
  auto owner = std::make_unique<std::shared_ptr<AlignedBuffer>>(request.arrived);
  void* const data = request.arrived->data();
  const std::size_t bytes = request.arrived->bytes();
  const nb::capsule capsule(owner.release(), [](void* pointer) noexcept {
    delete static_cast<std::shared_ptr<AlignedBuffer>*>(pointer);
  });
  return {data, {bytes}, capsule};
}

Request GroupAllReduce(Engine& engine, int group, const OutArray& array, const std::string& dtype_name,
                       const std::string& what) {
  const DType dtype = ParseDType(dtype_name);
  Request request(engine);
  request.source = nb::cast(array);
  engine.messenger().GroupAllReduce(group, array.data(), array.nbytes() / SizeOf(dtype), dtype, what,
                                    request.Callback());
  return request;
}

Request SendDevice(Engine& engine, const nb::object& array, Address data, std::size_t bytes, int peer,
                   int tag, const std::string& what, Address stream) {
  Request request(engine);
  request.source = array;
  const nb::gil_scoped_release release;
  engine.device_messages().Send(peer, tag, reinterpret_cast<const void*>(data), bytes, what,
                                reinterpret_cast<void*>(stream), request.Callback());
  return request;
}

Request ReceiveDevice(Engine& engine, const nb::object& array, Address out, std::size_t bytes, int peer,
                      int tag, const std::string& what, Address stream) {
  Request request(engine);
  request.source = array;
  const nb::gil_scoped_release release;
  engine.device_messages().Receive(peer, tag, reinterpret_cast<void*>(out), bytes, what,
                                   reinterpret_cast<void*>(stream), request.Callback());
  return request;
}

Request PostSend(Engine& engine, int peer, int tag, const std::string& what) {
  Request request(engine);
  request.number = engine.device_messages().PostSend(peer, tag, what, request.Callback());
  return request;
}

Request PostReceive(Engine& engine, std::size_t bytes, int peer, int tag, const std::string& what) {
  Request request(engine);
  const nb::gil_scoped_release release;
  request.number = engine.device_messages().PostReceive(peer, tag, bytes, what, request.Callback());
  return request;
}

Request PostGroupReduce(Engine& engine, int group, std::size_t count, const std::string& dtype_name,
                        const std::string& what) {
  const DType dtype = ParseDType(dtype_name);
  Request request(engine);
  const nb::gil_scoped_release release;
  request.number = engine.device_messages().PostGroupReduce(group, count, dtype, what, request.Callback());
  return request;
}

// TensorFlow's kernels send and take posted messages. From Python, only tests and
// bench.gpu do.
void SendPosted(Engine& engine, std::int64_t number, const nb::object& array, Address data, std::size_t bytes,
                Address stream) {
  const std::shared_ptr<const void> held(new nb::object(array), [](const void* object) {
    const nb::gil_scoped_acquire acquire;
    delete static_cast<const nb::object*>(object);
  });
  const nb::gil_scoped_release release;
  engine.device_messages().SendPosted(number, reinterpret_cast<const void*>(data), bytes,
                                      reinterpret_cast<void*>(stream), held);
}

void TakePosted(Engine& engine, std::int64_t number, Address out, std::size_t bytes,
                const std::string& dtype_name, Address stream) {
  const DType dtype = ParseDType(dtype_name);
  const nb::gil_scoped_release release;
  engine.device_messages().TakePosted(number, reinterpret_cast<void*>(out), bytes / SizeOf(dtype), dtype,
                                      reinterpret_cast<void*>(stream));
}

}  // namespace

void BindMessages(nb::module_& module, EngineClass& engine) {
  nb::class_<Request>(module, "Request")
      .def_prop_ro("done", &Request::done)
      .def_ro("number", &Request::number)
      .def("wait", &Request::Wait, nb::call_guard<nb::gil_scoped_release>())
      .def("arrived", &Arrived);
  engine.def("send", &Send, nb::arg("array"), nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("receive", &Receive, nb::arg("bytes"), nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("send_device", &SendDevice, nb::arg("array"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("peer"), nb::arg("tag"), nb::arg("what"), nb::arg("stream"))
      .def("receive_device", &ReceiveDevice, nb::arg("array"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("peer"), nb::arg("tag"), nb::arg("what"), nb::arg("stream"))
      .def("post_send", &PostSend, nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("post_receive", &PostReceive, nb::arg("bytes"), nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("post_group_reduce", &PostGroupReduce, nb::arg("group"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("what"))
      .def("send_posted", &SendPosted, nb::arg("number"), nb::arg("array"), nb::arg("address"),
           nb::arg("bytes"), nb::arg("stream"))
      .def("take_posted", &TakePosted, nb::arg("number"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("dtype"), nb::arg("stream"))
      .def(
          "add_group",
          [](Engine& self, const std::vector<int>& ranks) {
            return self.messenger().AddGroup(ranks, CheckSignals);
          },
          nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>())
      .def("group_all_reduce", &GroupAllReduce, nb::arg("group"), nb::arg("array").noconvert(),
           nb::arg("dtype"), nb::arg("what"));
}

}  // namespace hvpipe::python
