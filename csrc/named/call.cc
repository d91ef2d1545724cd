// Names, sizes and serialisation of calls.
#include "named/call.h"

#include <cstring>
#include <type_traits>

namespace hvpipe::named {

const char* NameOf(Kind kind) {
  static constexpr const char* kNames[] = {"allreduce",          "allgather", "broadcast", "alltoall",
                                           "reducescatter",      "barrier",   "join",      "add_process_set",
                                           "remove_process_set", "shutdown"};
  return kNames[static_cast<int>(kind)];
}

const char* NameOf(ReduceOp op) {
  static constexpr const char* kNames[] = {"average", "sum", "adasum", "min", "max", "product"};
  return kNames[static_cast<int>(op)];
}

std::int64_t TensorSpec::row_elements() const {
  std::int64_t product = 1;
  for (std::size_t axis = 1; axis < shape.size(); ++axis) product *= shape[axis];
  return product;
}

std::int64_t TensorSpec::elements() const { return rows() * row_elements(); }

std::size_t TensorSpec::BytesOfRows(std::int64_t count) const {
  return static_cast<std::size_t>(count * row_elements()) * SizeOf(type);
}

std::string TensorSpec::Described() const {
  std::string text = std::string(NameOf(type)) + "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(shape[axis]);
  }
  return text + "]";
}

std::string Request::Described() const {
  std::string text = NameOf(kind);
  if (kind == Kind::kAllreduce || kind == Kind::kReducescatter) text += std::string(" (") + NameOf(op) + ")";
  if (kind == Kind::kBroadcast) text += " from rank " + std::to_string(root);
  if (kind == Kind::kRemoveSet) return text + " " + std::to_string(root);
  if (kind == Kind::kAddSet) {
    if (splits.empty()) text += " of no rank";
    for (std::size_t i = 0; i < splits.size(); ++i) {
      text += (i == 0 ? " of ranks " : ", ") + std::to_string(splits[i]);
    }
    return text;
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (i == 3 && tensors.size() > 4) return text + " and " + std::to_string(tensors.size() - 3) + " more";
    text += (i == 0 ? " of " : ", ") + tensors[i].Described();
  }
  if (prescale != 1) text += ", prescale_factor=" + std::to_string(prescale);
  if (postscale != 1) text += ", postscale_factor=" + std::to_string(postscale);
  return text;
}

namespace {

// All ranks have one byte order, which the MPI types used here assume as well.
class Writer {
 public:
  template <typename T>
  void Add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Add(const std::string& text) {
    Add(static_cast<std::uint64_t>(text.size()));
    bytes_ += text;
  }
  template <typename T>
  void Add(const std::vector<T>& values) {
    Add(static_cast<std::uint64_t>(values.size()));
    for (const T& value : values) Add(value);
  }
  void Add(const TensorSpec& tensor) {
    Add(tensor.type);
    Add(tensor.shape);
  }
  void Add(const Request& request) { Add(Encoded(request)); }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  void Take(T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    std::memcpy(&value, Next(sizeof value), sizeof value);
  }
  void Take(std::string& text) {
    std::uint64_t size = 0;
    Take(size);
    text.assign(Next(size), size);
  }
  template <typename T>
  void Take(std::vector<T>& values) {
    std::uint64_t size = 0;
    Take(size);
    values.clear();
    for (std::uint64_t i = 0; i < size; ++i) {
      T value{};
      Take(value);
      values.push_back(std::move(value));
    }
  }
  void Take(TensorSpec& tensor) {
    Take(tensor.type);
    Take(tensor.shape);
  }
  void Take(Request& request) {
    std::string bytes;
    Take(bytes);
    request = DecodedRequest(bytes);
  }

 private:
  const char* Next(std::uint64_t size) {
    if (size > bytes_.size() - at_) throw Error("internal: a control message is too short");
    const char* const found = bytes_.data() + at_;
    at_ += size;
    return found;
  }

  const std::string& bytes_;
  std::size_t at_ = 0;
};

// The fields in the order of the byte form; `Stream` is a Writer or a Reader.
template <typename Do, typename R>
void ForEachField(R& request, const Do& act) {
  act(request.kind);
  act(request.name);
  act(request.set);
  act(request.op);
  act(request.root);
  act(request.prescale);
  act(request.postscale);
  act(request.tensors);
  act(request.splits);
  act(request.refused);
}

template <typename Do, typename R>
void ForEachFieldOfResponse(R& response, const Do& act) {
  act(response.kind);
  act(response.name);
  act(response.set);
  act(response.error);
  act(response.error_kind);
  act(response.extents);
  act(response.number);
  act(response.example);
}

}  // namespace

std::string Encoded(const Request& request) {
  Writer writer;
  ForEachField(request, [&](const auto& field) { writer.Add(field); });
  return writer.Take();
}

std::string Encoded(const Response& response) {
  Writer writer;
  ForEachFieldOfResponse(response, [&](const auto& field) { writer.Add(field); });
  return writer.Take();
}

Request DecodedRequest(const std::string& bytes) {
  Request request;
  Reader reader(bytes);
  ForEachField(request, [&](auto& field) { reader.Take(field); });
  return request;
}

Response DecodedResponse(const std::string& bytes) {
  Response response;
  Reader reader(bytes);
  ForEachFieldOfResponse(response, [&](auto& field) { reader.Take(field); });
  return response;
}

}  // namespace hvpipe::named
