// Functions of the Python module on arrays: casts, sums, and the address of a device array.
#include <tuple>
#include <vector>

#include "base/vector_loops.h"
#include "faces/python.h"

namespace hvpipe::python {

DType ParseDType(const std::string& name) {
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt8}) {
    if (name == NameOf(dtype)) return dtype;
  }
  throw Error("dtype should be float32, float64, float16, bfloat16 or int8. Received: dtype=" + name,
              ErrorKind::kUsage);
}

namespace {

// Return address, bytes, type code and type bits (as in DLPack), and shape of a C-contiguous array on a
// device. Accepts arrays of any memory and order, so that errors can say what was received.
std::tuple<Address, std::size_t, int, int, std::vector<std::size_t>> DeviceMemory(
    const nb::ndarray<>& array) {
  if (array.device_type() != nb::device::cuda::value &&
      array.device_type() != nb::device::cuda_managed::value) {
    throw Error("The array should be in GPU memory. Received: an array of DLPack device type " +
                    std::to_string(array.device_type()),
                ErrorKind::kUsage);
  }
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  std::int64_t wanted = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.size() > 0 && shape[i] > 1 && array.stride(i) != wanted) {
      throw Error("Expected a C-contiguous device array. Received: a stride of " +
                      std::to_string(array.stride(i)) + " elements where " + std::to_string(wanted) +
                      " would be contiguous",
                  ErrorKind::kUsage);
    }
    wanted *= static_cast<std::int64_t>(shape[i]);
  }
  return {reinterpret_cast<Address>(array.data()), array.nbytes(), array.dtype().code, array.dtype().bits,
          shape};
}

void CastArray(const InArray& in, const std::string& from, const OutArray& out, const std::string& to,
               double scale) {
  const DType source = ParseDType(from);
  const std::size_t count = in.nbytes() / SizeOf(source);
  if (out.nbytes() != count * SizeOf(ParseDType(to))) {
    throw Error("The output should have as many elements as the input", ErrorKind::kUsage);
  }
  ScaleAndCast(in.data(), source, out.data(), ParseDType(to), count, scale);
}

void SumArrays(const std::vector<InArray>& sources, const OutArray& out, const std::string& dtype_name) {
  const DType dtype = ParseDType(dtype_name);
  if (sources.empty()) throw Error("Expected at least one array.", ErrorKind::kUsage);
  std::vector<const void*> pointers;
  for (const InArray& source : sources) {
    if (source.nbytes() != out.nbytes()) throw Error("All arrays should have one size", ErrorKind::kUsage);
    pointers.push_back(source.data());
  }
  SumInto(out.data(), pointers.data(), pointers.size(), dtype, out.nbytes() / SizeOf(dtype));
}

}  // namespace

void BindArrays(nb::module_& module) {
  module.def("device_memory", &DeviceMemory, nb::arg("array").noconvert());
  module.def("cast", &CastArray, nb::arg("array"), nb::arg("dtype"), nb::arg("out"), nb::arg("out_dtype"),
             nb::arg("scale"));
  module.def("sum_arrays", &SumArrays, nb::arg("arrays"), nb::arg("out"), nb::arg("dtype"));
}

}  // namespace hvpipe::python
