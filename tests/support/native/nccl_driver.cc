// Makes a communicator of one rank with the given NCCL, sums numbers and sends them to itself. Prints the
// results, or the error.
//
//   nccl_driver LIBRARY [TIMEOUT_S] [fail-in-group | send-elsewhere]
//
// With -DNAMESAKE -rdynamic it exports functions with NCCL's names, as TensorFlow's GPU wheel does. With
// -DOWN_MALLOC -rdynamic it has a malloc of its own, like a process with tcmalloc preloaded.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/nccl.h"

#ifdef NAMESAKE
extern "C" int ncclGroupStart() { return 5; }
extern "C" int ncclGetVersion(int*) { return 5; }
#endif

#ifdef OWN_MALLOC
namespace {
alignas(16) char arena[std::size_t{1} << 26];
std::atomic<std::size_t> used{0};
}  // namespace

extern "C" {
// Each allocation follows 16 bytes that hold its size, and is never reused.
void* malloc(std::size_t bytes) noexcept {
  const std::size_t taken = (bytes + 31) / 16 * 16;
  char* const piece = arena + used.fetch_add(taken);
  std::memcpy(piece, &bytes, sizeof bytes);
  return piece + 16;
}
void* calloc(std::size_t count, std::size_t bytes) noexcept { return malloc(count * bytes); }
void* realloc(void* old, std::size_t bytes) noexcept {
  void* const piece = malloc(bytes);
  std::size_t before = 0;
  if (old != nullptr) std::memcpy(&before, static_cast<char*>(old) - 16, sizeof before);
  if (before > 0) std::memcpy(piece, old, before < bytes ? before : bytes);
  return piece;
}
void free(void*) noexcept {}
}
#endif

namespace {

void Print(const char* what, const float (&of)[3]) {
  std::printf("%s %g %g %g\n", what, static_cast<double>(of[0]), static_cast<double>(of[1]),
              static_cast<double>(of[2]));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const hvpipe::NcclLibrary library(argv[1]);
    std::printf("version %s\n", library.VersionText().c_str());
    if (argc < 3) return 0;
    const double timeout_s = std::atof(argv[2]);
    const auto go_on = [] {};
    hvpipe::NcclCommunicator communicator(library, nullptr, 0, 1, library.NewId());
    communicator.WaitUntilReady(timeout_s, "joining", go_on);
    const std::string how = argc > 3 ? argv[3] : "";
    float numbers[3] = {1, 2, 3}, sum[3] = {-1, -1, -1}, received[3] = {-1, -1, -1};
    communicator.Grouped([&] {
      communicator.AllReduce(numbers, sum, 3, hvpipe::DType::kFloat32, nullptr);
      if (how == "fail-in-group") communicator.Broadcast(sum, sizeof sum, 0, nullptr);
    });
    communicator.WaitUntilReady(timeout_s, "an all-reduce", go_on);
    Print("sum", sum);
    communicator.Grouped([&] {
      communicator.Send(numbers, sizeof numbers, how == "send-elsewhere" ? 1 : 0, nullptr);
      communicator.Receive(received, sizeof received, 0, nullptr);
    });
    communicator.WaitUntilReady(timeout_s, "a message to itself", go_on);
    Print("received", received);
    communicator.Close(timeout_s);
    return 0;
  } catch (const hvpipe::Error& error) {
    std::printf("error %d: %s\n", static_cast<int>(error.kind()), error.what());
    return 3;
  }
}
