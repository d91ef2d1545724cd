// What the files of the Python module share: array types, waiting, and lifetimes of arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "engine/engine.h"

namespace nb = nanobind;

namespace hvpipe::python {

using InArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using OutArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
// An array in device memory is passed as (address, bytes), which Python code reads from the array's own
// protocol.
using Address = std::uintptr_t;
using EngineClass = nb::class_<Engine>;

// The dtype with this name. Throws for any other name.
DType ParseDType(const std::string& name);
// Raise KeyboardInterrupt and the like while the caller waits without the interpreter lock.
void CheckSignals();

// Lets the calling thread wait for a callback of the progress thread.
class Waiter {
 public:
  void Set(const Error* error);
  bool set() const;
  bool set_without_error() const;
  // Throws the error, if there was one.
  void Wait();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::optional<Error> error_;
};

// Keep an array until the process ends: after an error MPI may still read it, or receive into it.
template <typename Array>
void LeakArray(const Array& array) {
  (void)new Array(array);
}

// Call without the interpreter lock.
template <typename Call, typename... Arrays>
void CallWithoutGil(const Call& call, const Arrays&... arrays) {
  try {
    const nb::gil_scoped_release release;
    call();
  } catch (...) {
    (LeakArray(arrays), ...);
    throw;
  }
}

// Each adds the methods of its file to the class.
void BindBuckets(EngineClass& engine);
void BindCollectives(EngineClass& engine);
void BindMessages(nb::module_& module, EngineClass& engine);
void BindNamedCalls(nb::module_& module);
void BindSockets(nb::module_& module);
// Functions on arrays, without an engine.
void BindArrays(nb::module_& module);

}  // namespace hvpipe::python
