// The engine's Python face: arrays in host memory, addresses in device memory, exceptions, interrupts.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <tuple>

#include "core/check.h"
#include "core/engine.h"

namespace nb = nanobind;
using hvpipe::DType;
using hvpipe::Engine;
using hvpipe::Error;
using hvpipe::ErrorKind;

namespace {

using InArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using OutArray = nb::ndarray<nb::c_contig, nb::device::cpu>;

DType ParseDType(const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    if (name == hvpipe::NameOf(dtype)) return dtype;
  }
  throw Error("Wanted a dtype of float32, float64, float16 or bfloat16. Received: dtype=" + name,
              ErrorKind::kUsage);
}

// Lets Ctrl-C through while the caller waits without the interpreter lock.
void CheckSignals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Waits on the calling thread for something that the progress thread will call back about.
class Waiter {
 public:
  void Set(const Error* error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error != nullptr) error_ = *error;
    set_ = true;
    changed_.notify_all();
  }
  bool set() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return set_;
  }
  bool set_without_error() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return set_ && !error_;
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return set_; })) {
      lock.unlock();
      CheckSignals();
      lock.lock();
    }
    if (error_) throw *error_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::optional<Error> error_;
};

// Leaves an array to the end of the process: after an error MPI may still read it, or receive into it.
template <typename Array>
void Keep(const Array& array) {
  (void)new Array(array);
}

// Calls without the interpreter lock.
template <typename Call, typename... Arrays>
void CallOn(const Call& call, const Arrays&... arrays) {
  try {
    const nb::gil_scoped_release release;
    call();
  } catch (...) {
    (Keep(arrays), ...);
    throw;
  }
}

// Something under way that the engine will end; holds what it is about until then.
class Request {
 public:
  explicit Request(const Engine& engine) : waiter_(std::make_shared<Waiter>()), awaited_(engine.awaited()) {}
  ~Request() {
    if (source.is_valid() && !waiter_->set_without_error()) Keep(source);
  }
  Request(Request&&) = default;
  Request& operator=(Request&&) = delete;
  Engine::Done Done() const {
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

  std::int64_t number = -1;                        // of a message whose array comes later
  nb::object source;                               // of a send, or what is received into
  std::shared_ptr<hvpipe::AlignedBuffer> arrived;  // of a receive

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
  engine.Send(peer, tag, data, bytes, what, request.Done());
  return request;
}

Request Receive(Engine& engine, std::size_t bytes, int peer, int tag, const std::string& what) {
  Request request(engine);
  request.arrived = engine.Receive(peer, tag, bytes, what, request.Done());
  return request;
}

// The bytes that have come, in memory that lives as long as the array.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> Arrived(const Request& request) {
  if (!request.arrived) throw Error("Only a receive has bytes that arrive.", ErrorKind::kUsage);
  auto owner = std::make_unique<std::shared_ptr<hvpipe::AlignedBuffer>>(request.arrived);
  void* const data = request.arrived->data();
  const std::size_t bytes = request.arrived->bytes();
  const nb::capsule capsule(owner.release(), [](void* pointer) noexcept {
    delete static_cast<std::shared_ptr<hvpipe::AlignedBuffer>*>(pointer);
  });
  return {data, {bytes}, capsule};
}

Request GroupAllReduce(Engine& engine, int group, const OutArray& array, const std::string& dtype_name,
                       const std::string& what) {
  const DType dtype = ParseDType(dtype_name);
  Request request(engine);
  request.source = nb::cast(array);
  engine.GroupAllReduce(group, array.data(), array.nbytes() / hvpipe::SizeOf(dtype), dtype, what,
                        request.Done());
  return request;
}

std::shared_ptr<Engine> MakeEngine(int fortran_handle, double timeout_s, std::size_t segment_bytes,
                                   int messages_in_flight, std::size_t slot_bytes, bool shared_memory,
                                   int ranks_per_host, bool trace) {
  hvpipe::EngineOptions options;
  options.timeout_s = timeout_s;
  // An MPI may have any eager limit; counts of MPI are ints.
  options.segment_bytes = std::clamp<std::size_t>(segment_bytes, 64, std::size_t{1} << 30);
  options.messages_in_flight = messages_in_flight;
  options.slot_bytes = slot_bytes;
  options.shared_memory = shared_memory;
  options.ranks_per_host = ranks_per_host;
  options.trace = trace;
  const nb::gil_scoped_release release;
  return std::make_shared<Engine>(MPI_Comm_f2c(fortran_handle), options);
}

using BucketSpec =
    std::tuple<std::string, std::string, std::string, std::vector<std::size_t>, int, std::size_t>;

int AddPlan(Engine& engine, const std::string& name, std::uint64_t signature,
            const std::vector<BucketSpec>& buckets, bool on_device) {
  std::vector<hvpipe::BucketLayout> layouts;
  for (const auto& [bucket, dtype, wire, counts, priority, row] : buckets) {
    layouts.emplace_back(bucket, ParseDType(dtype), ParseDType(wire), counts, priority);
    layouts.back().row = row;
  }
  const auto memory = on_device ? hvpipe::Memory::kDevice : hvpipe::Memory::kHost;
  return engine.AddPlan(name, signature, std::move(layouts), memory);
}

std::tuple<double, double> BeginStep(Engine& engine, int plan, std::int64_t step, double samples,
                                     bool reduces) {
  const nb::gil_scoped_release release;
  // Shared: an interrupted wait leaves before the callback comes.
  auto waiter = std::make_shared<Waiter>();
  auto outcome = std::make_shared<std::pair<double, double>>();
  engine.BeginStep(plan, step, samples, reduces, [=](const Error* error, double scale, double total) {
    *outcome = {scale, total};
    waiter->Set(error);
  });
  waiter->Wait();
  return {outcome->first, outcome->second};
}

void CheckSizes(const hvpipe::BucketLayout& layout, const std::vector<std::size_t>& bytes) {
  const std::size_t element = hvpipe::SizeOf(layout.tensor_type);
  bool same = bytes.size() == layout.counts.size();
  for (std::size_t i = 0; same && i < bytes.size(); ++i) same = bytes[i] == layout.counts[i] * element;
  if (!same) {
    throw Error(
        "Wanted the tensors of bucket " + layout.name + ". Received: tensors of other sizes or number",
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
  CheckSizes(engine.layout(plan, bucket), bytes);
  const nb::gil_scoped_release release;
  engine.Submit(plan, bucket, pointers, scale);
}

void Collect(Engine& engine, int plan, int bucket, const std::vector<OutArray>& tensors) {
  std::vector<void*> pointers;
  std::vector<std::size_t> bytes;
  for (const OutArray& tensor : tensors) {
    pointers.push_back(tensor.data());
    bytes.push_back(tensor.nbytes());
  }
  CheckSizes(engine.layout(plan, bucket), bytes);
  const nb::gil_scoped_release release;
  auto waiter = std::make_shared<Waiter>();
  engine.Collect(plan, bucket, [=](const Error* error) { waiter->Set(error); });
  waiter->Wait();
  engine.Unpack(plan, bucket, pointers);
}

void AllReduce(Engine& engine, const void* from, void* to, std::size_t bytes, const std::string& dtype_name,
               double scale, const std::string& what) {
  const DType dtype = ParseDType(dtype_name);
  const std::size_t count = bytes / hvpipe::SizeOf(dtype);
  std::string call;
  call.reserve(64);
  call.append(what).append(" of ").append(dtype_name).append("[").append(std::to_string(count)).append("]");
  engine.AllReduce(from, to, count, dtype, scale, call, CheckSignals);
}

void AllReduceInto(Engine& engine, const InArray& in, const OutArray& out, const std::string& dtype_name,
                   double scale, const std::string& what) {
  if (in.nbytes() != out.nbytes()) {
    throw Error("Wanted input and output of one size. Received: " + std::to_string(in.nbytes()) + " and " +
                    std::to_string(out.nbytes()) + " bytes",
                ErrorKind::kUsage);
  }
  const void* from = in.data();
  void* to = out.data();
  const std::size_t bytes = in.nbytes();
  CallOn([&] { AllReduce(engine, from, to, bytes, dtype_name, scale, what); }, in, out);
}

// A NumPy array's memory by the buffer protocol: 0.2 us sooner than by DLPack.
class WritableBuffer {
 public:
  explicit WritableBuffer(const nb::object& array) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0) return;
    PyErr_Clear();
    throw Error(
        "out should be a writable C-contiguous array. Received: an array that is read-only or not "
        "C-contiguous",
        ErrorKind::kUsage);
  }
  ~WritableBuffer() { PyBuffer_Release(&view_); }
  WritableBuffer(const WritableBuffer&) = delete;
  WritableBuffer& operator=(const WritableBuffer&) = delete;
  void* data() const { return view_.buf; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

void AllReduceInPlace(Engine& engine, const nb::object& array, const std::string& dtype_name, double scale,
                      const std::string& what) {
  const WritableBuffer buffer(array);
  CallOn([&] { AllReduce(engine, buffer.data(), buffer.data(), buffer.bytes(), dtype_name, scale, what); },
         array);
}

// Arrays in device memory come as (address, bytes), which Python reads from the array's own protocol.
using Address = std::uintptr_t;
using DeviceTensors = std::vector<std::pair<Address, std::size_t>>;

template <typename Pointer>
std::vector<Pointer> PointersOf(const hvpipe::BucketLayout& layout, const DeviceTensors& tensors) {
  std::vector<Pointer> pointers;
  std::vector<std::size_t> bytes;
  for (const auto& [address, size] : tensors) {
    pointers.push_back(reinterpret_cast<Pointer>(address));
    bytes.push_back(size);
  }
  CheckSizes(layout, bytes);
  return pointers;
}

std::string UseDevice(Engine& engine, const std::string& library, int ordinal, const std::string& nccl,
                      bool nccl_required, bool may_share, const std::string& nccl_span) {
  if (nccl_span != "world" && nccl_span != "host") {
    throw Error("nccl_span should be world or host. Received: nccl_span=" + nccl_span, ErrorKind::kUsage);
  }
  const auto span = nccl_span == "host" ? hvpipe::NcclSpan::kHost : hvpipe::NcclSpan::kWorld;
  const nb::gil_scoped_release release;
  return engine.UseDevice({library, ordinal, nccl, nccl_required, may_share, span}, CheckSignals);
}

void SubmitDevice(Engine& engine, int plan, int bucket, const DeviceTensors& tensors, double scale,
                  Address stream) {
  const auto pointers = PointersOf<const void*>(engine.layout(plan, bucket), tensors);
  const nb::gil_scoped_release release;
  engine.SubmitDevice(plan, bucket, pointers, scale, reinterpret_cast<void*>(stream));
}

void CollectDevice(Engine& engine, int plan, int bucket, const DeviceTensors& tensors, Address stream) {
  const auto pointers = PointersOf<void*>(engine.layout(plan, bucket), tensors);
  const nb::gil_scoped_release release;
  auto waiter = std::make_shared<Waiter>();
  engine.Collect(plan, bucket, [=](const Error* error) { waiter->Set(error); });
  waiter->Wait();
  engine.UnpackDevice(plan, bucket, pointers, reinterpret_cast<void*>(stream));
}

void AllReduceDevice(Engine& engine, Address in, Address out, std::size_t bytes,
                     const std::string& dtype_name, double scale, const std::string& what, Address stream) {
  const DType dtype = ParseDType(dtype_name);
  const std::size_t count = bytes / hvpipe::SizeOf(dtype);
  const nb::gil_scoped_release release;
  const std::string call = what + " of " + dtype_name + "[" + std::to_string(count) + "] on a device";
  engine.AllReduceDevice(reinterpret_cast<const void*>(in), reinterpret_cast<void*>(out), count, dtype, scale,
                         call, reinterpret_cast<void*>(stream), CheckSignals);
}

void BroadcastDevice(Engine& engine, Address data, std::size_t bytes, int root, const std::string& what,
                     Address stream) {
  const nb::gil_scoped_release release;
  engine.BroadcastDevice(reinterpret_cast<void*>(data), bytes, root, what + " on a device",
                         reinterpret_cast<void*>(stream), CheckSignals);
}

Request SendDevice(Engine& engine, const nb::object& array, Address data, std::size_t bytes, int peer,
                   int tag, const std::string& what, Address stream) {
  Request request(engine);
  request.source = array;
  const nb::gil_scoped_release release;
  engine.SendDevice(peer, tag, reinterpret_cast<const void*>(data), bytes, what,
                    reinterpret_cast<void*>(stream), request.Done());
  return request;
}

Request ReceiveDevice(Engine& engine, const nb::object& array, Address out, std::size_t bytes, int peer,
                      int tag, const std::string& what, Address stream) {
  Request request(engine);
  request.source = array;
  const nb::gil_scoped_release release;
  engine.ReceiveDevice(peer, tag, reinterpret_cast<void*>(out), bytes, what, reinterpret_cast<void*>(stream),
                       request.Done());
  return request;
}

Request PostSend(Engine& engine, int peer, int tag, const std::string& what) {
  Request request(engine);
  request.number = engine.PostSend(peer, tag, what, request.Done());
  return request;
}

Request PostReceive(Engine& engine, std::size_t bytes, int peer, int tag, const std::string& what) {
  Request request(engine);
  const nb::gil_scoped_release release;
  request.number = engine.PostReceive(peer, tag, bytes, what, request.Done());
  return request;
}

// Address, bytes, code and bits of the type (as DLPack has them) and shape of a C-contiguous array on a
// device. Of any memory and any order, so that what is refused can be said.
std::tuple<Address, std::size_t, int, int, std::vector<std::size_t>> DeviceMemory(
    const nb::ndarray<>& array) {
  if (array.device_type() != nb::device::cuda::value &&
      array.device_type() != nb::device::cuda_managed::value) {
    throw Error("An array in a GPU's memory is wanted. Received: one of DLPack's device type " +
                    std::to_string(array.device_type()),
                ErrorKind::kUsage);
  }
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  std::int64_t wanted = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.size() > 0 && shape[i] > 1 && array.stride(i) != wanted) {
      throw Error("A C-contiguous device array is wanted. Received: a stride of " +
                      std::to_string(array.stride(i)) + " elements where " + std::to_string(wanted) +
                      " would be contiguous",
                  ErrorKind::kUsage);
    }
    wanted *= static_cast<std::int64_t>(shape[i]);
  }
  return {reinterpret_cast<Address>(array.data()), array.nbytes(), array.dtype().code, array.dtype().bits,
          shape};
}

void Cast(const InArray& in, const std::string& from, const OutArray& out, const std::string& to,
          double scale) {
  const DType source = ParseDType(from);
  const std::size_t count = in.nbytes() / hvpipe::SizeOf(source);
  if (out.nbytes() != count * hvpipe::SizeOf(ParseDType(to))) {
    throw Error("Wanted an output of as many elements as the input", ErrorKind::kUsage);
  }
  hvpipe::PackScaled(in.data(), source, out.data(), ParseDType(to), count, scale);
}

void SumArrays(const std::vector<InArray>& sources, const OutArray& out, const std::string& dtype_name) {
  const DType dtype = ParseDType(dtype_name);
  if (sources.empty()) throw Error("Wanted at least one array. Received: none", ErrorKind::kUsage);
  std::vector<const void*> pointers;
  for (const InArray& source : sources) {
    if (source.nbytes() != out.nbytes()) throw Error("Wanted arrays of one size", ErrorKind::kUsage);
    pointers.push_back(source.data());
  }
  hvpipe::SumInto(out.data(), pointers.data(), pointers.size(), dtype, out.nbytes() / hvpipe::SizeOf(dtype));
}

nb::dict CountersOf(const Engine& engine) {
  const hvpipe::Counters counters = engine.counters();
  nb::dict result;
  result["network_bytes_sent"] = counters.network_bytes_sent;
  result["network_bytes_received"] = counters.network_bytes_received;
  result["shared_memory_bytes"] = counters.shared_memory_bytes;
  result["messages_sent"] = counters.messages_sent;
  result["operations"] = counters.operations;
  result["steps"] = counters.steps;
  result["sleeps"] = counters.sleeps;
  result["exposed_wait_s"] = counters.exposed_wait_s;
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

void TranslateError(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const char* name = "HvpipeError";
    if (error.kind() == ErrorKind::kMismatch) name = "MismatchError";
    if (error.kind() == ErrorKind::kDeadline) name = "DeadlineError";
    if (error.kind() == ErrorKind::kPeer) name = "PeerError";
    const nb::object type = nb::module_::import_("hvpipe.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace

NB_MODULE(_engine, m) {
  nb::register_exception_translator(TranslateError);
  nb::class_<Request>(m, "Request")
      .def_prop_ro("done", &Request::done)
      .def_ro("number", &Request::number)
      .def("wait", &Request::Wait, nb::call_guard<nb::gil_scoped_release>())
      .def("arrived", &Arrived);
  nb::class_<Engine>(m, "Engine")
      .def_static("create", &MakeEngine, nb::arg("fortran_handle"), nb::kw_only(), nb::arg("timeout_s"),
                  nb::arg("segment_bytes"), nb::arg("messages_in_flight"), nb::arg("slot_bytes"),
                  nb::arg("shared_memory"), nb::arg("ranks_per_host"), nb::arg("trace"))
      .def_prop_ro("rank", &Engine::rank)
      .def_prop_ro("size", &Engine::size)
      .def_prop_ro("local_rank", &Engine::local_rank)
      .def_prop_ro("local_size", &Engine::local_size)
      .def_prop_ro("hosts", &Engine::hosts)
      .def("add_plan", &AddPlan, nb::arg("name"), nb::arg("signature"), nb::arg("buckets"),
           nb::arg("on_device") = false)
      .def("remove_plan", &Engine::RemovePlan, nb::arg("plan"), nb::call_guard<nb::gil_scoped_release>())
      .def("begin_step", &BeginStep, nb::arg("plan"), nb::arg("step"), nb::arg("samples"), nb::arg("reduces"))
      .def("submit", &Submit, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"), nb::arg("scale"))
      .def("collect", &Collect, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"))
      .def("all_reduce", &AllReduceInto, nb::arg("array"), nb::arg("out"), nb::arg("dtype"), nb::arg("scale"),
           nb::arg("what"))
      .def("all_reduce_in_place", &AllReduceInPlace, nb::arg("array"), nb::arg("dtype"), nb::arg("scale"),
           nb::arg("what"))
      .def("use_device", &UseDevice, nb::arg("library"), nb::arg("ordinal"), nb::arg("nccl"),
           nb::arg("nccl_required"), nb::arg("may_share"), nb::arg("nccl_span"))
      .def("submit_device", &SubmitDevice, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"),
           nb::arg("scale"), nb::arg("stream"))
      .def("collect_device", &CollectDevice, nb::arg("plan"), nb::arg("bucket"), nb::arg("tensors"),
           nb::arg("stream"))
      .def("all_reduce_device", &AllReduceDevice, nb::arg("address"), nb::arg("out"), nb::arg("bytes"),
           nb::arg("dtype"), nb::arg("scale"), nb::arg("what"), nb::arg("stream"))
      .def("send_device", &SendDevice, nb::arg("array"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("peer"), nb::arg("tag"), nb::arg("what"), nb::arg("stream"))
      .def("receive_device", &ReceiveDevice, nb::arg("array"), nb::arg("address"), nb::arg("bytes"),
           nb::arg("peer"), nb::arg("tag"), nb::arg("what"), nb::arg("stream"))
      .def("post_send", &PostSend, nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("post_receive", &PostReceive, nb::arg("bytes"), nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("broadcast_device", &BroadcastDevice, nb::arg("address"), nb::arg("bytes"), nb::arg("root"),
           nb::arg("what"), nb::arg("stream"))
      .def(
          "broadcast",
          [](Engine& engine, const OutArray& array, int root, const std::string& what) {
            void* data = array.data();
            const std::size_t bytes = array.nbytes();
            CallOn([&] { engine.Broadcast(data, bytes, root, what, CheckSignals); }, array);
          },
          nb::arg("array"), nb::arg("root"), nb::arg("what"))
      .def(
          "all_gather",
          [](Engine& engine, const InArray& array, const OutArray& out, const std::string& what) {
            const std::size_t bytes = array.nbytes();
            if (out.nbytes() != bytes * static_cast<std::size_t>(engine.size())) {
              throw Error("Wanted an output of size times the input", ErrorKind::kUsage);
            }
            const void* from = array.data();
            void* to = out.data();
            CallOn([&] { engine.AllGather(from, to, bytes, what, CheckSignals); }, array, out);
          },
          nb::arg("array"), nb::arg("out"), nb::arg("what"))
      .def(
          "agree",
          [](Engine& engine, const std::string& what, double samples, bool patient) {
            const nb::gil_scoped_release release;
            return engine.Agree(what, samples, CheckSignals, patient);
          },
          nb::arg("what"), nb::arg("samples") = 0.0, nb::arg("patient") = false)
      .def(
          "fail",
          [](Engine& engine, const std::string& message) {
            const nb::gil_scoped_release release;
            engine.Fail(Error(message, ErrorKind::kUsage));
          },
          nb::arg("message"))
      .def("announced", &Engine::Announced)
      .def("send", &Send, nb::arg("array"), nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def("receive", &Receive, nb::arg("bytes"), nb::arg("peer"), nb::arg("tag"), nb::arg("what"))
      .def(
          "add_group",
          [](Engine& engine, const std::vector<int>& ranks) { return engine.AddGroup(ranks, CheckSignals); },
          nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>())
      .def("group_all_reduce", &GroupAllReduce, nb::arg("group"), nb::arg("array"), nb::arg("dtype"),
           nb::arg("what"))
      .def("stop", &Engine::Stop, nb::call_guard<nb::gil_scoped_release>())
      .def("counters", &CountersOf)
      .def("take_events", &TakeEvents)
      .def(
          "log",
          [](Engine& engine, const std::string& category, const std::string& name, double start_s,
             double end_s) { engine.log().Add(category, name, start_s, end_s); },
          nb::arg("category"), nb::arg("name"), nb::arg("start_s"), nb::arg("end_s"));
  m.def("set_default", &hvpipe::SetDefaultEngine, nb::arg("engine").none());
  m.def("now", &hvpipe::Now);
  m.def("count_devices", &hvpipe::CountDevices, nb::arg("library"));
  m.def("device_memory", &DeviceMemory, nb::arg("array").noconvert());
  m.def("cast", &Cast, nb::arg("array"), nb::arg("dtype"), nb::arg("out"), nb::arg("out_dtype"),
        nb::arg("scale"));
  m.def("sum_arrays", &SumArrays, nb::arg("arrays"), nb::arg("out"), nb::arg("dtype"));
}
