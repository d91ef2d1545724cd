// Makes a communicator of one rank with the NCCL named, adds up numbers, prints the sum or the error.
//
//   nccl_driver LIBRARY [TIMEOUT_S] [fail-in-group]
//
// Compiled with -DNAMESAKE -rdynamic it has a function of NCCL's name, as TensorFlow's GPU wheel does.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "nccl.h"

#ifdef NAMESAKE
extern "C" int ncclGroupStart() { return 5; }
#endif

int main(int argc, char** argv) {
  try {
    const hvpipe::NcclLibrary library(argv[1]);
    std::printf("version %s\n", library.VersionText().c_str());
    if (argc < 3) return 0;
    const double timeout_s = std::atof(argv[2]);
    const auto go_on = [] {};
    hvpipe::NcclCommunicator communicator(library, 0, 1, library.NewId());
    communicator.WaitUntilReady(timeout_s, "joining", go_on);
    float numbers[3] = {1, 2, 3}, sum[3] = {-1, -1, -1};
    communicator.Grouped([&] {
      communicator.AllReduce(numbers, sum, 3, hvpipe::DType::kFloat32, nullptr);
      if (argc > 3) communicator.Broadcast(sum, sizeof sum, 0, nullptr);
    });
    communicator.WaitUntilReady(timeout_s, "an all-reduce", go_on);
    std::printf("sum %g %g %g\n", static_cast<double>(sum[0]), static_cast<double>(sum[1]),
                static_cast<double>(sum[2]));
    communicator.Close(timeout_s);
    return 0;
  } catch (const hvpipe::Error& error) {
    std::printf("error %d: %s\n", static_cast<int>(error.kind()), error.what());
    return 3;
  }
}
