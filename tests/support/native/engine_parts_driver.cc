// Checks parts of the engine that need neither MPI nor a GPU, one case at a time: prints what it found.
//
//   engine_parts_driver CASE
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "collectives/segments.h"
#include "collectives/send_budget.h"
#include "gpu/device_memory.h"
#include "gpu/posted_messages.h"

namespace {

using hvpipe::Error;
using hvpipe::OwnedHandle;

// A posted message is taken at most once, and EndSends ends sends only.
void Posted() {
  hvpipe::PostedMessages posted;
  const auto tell = [](const char* name) {
    return [name](const Error* error) { std::printf("%s ended: %s\n", name, error->what()); };
  };
  const auto first = posted.Add({1, 0, "first", tell("first"), nullptr, 0});
  const auto second = posted.Add({1, 0, "second", tell("second"), nullptr, 0});
  const auto receive = posted.Add({1, 0, "receive", nullptr, std::make_shared<int>(), 8});
  const bool taken = posted.Take(first).has_value(), again = posted.Take(first).has_value();
  std::printf("first taken: %d, again: %d\n", taken, again);
  posted.EndSends(Error("the end"));
  std::printf("second taken: %d, receive taken: %d\n", posted.Take(second).has_value(),
              posted.Take(receive)->receives());
}

// Memory that was given back serves the next message of about its size. When the device is full, the pool frees
// what it keeps before it gives up.
void Pool() {
  std::size_t held = 0;
  const std::size_t most = 3100;
  hvpipe::MemoryPool pool([&](std::size_t bytes) -> OwnedHandle {
    if (held + bytes > most) throw Error("full");
    std::printf("allocates %zu\n", bytes);
    held += bytes;
    return {new char[bytes], [&held, bytes](void* memory) {
              delete[] static_cast<char*>(memory);
              held -= bytes;
            }};
  });
  const void* const first = pool.Take(1000).get();
  std::printf("again: %d\n", pool.Take(900).get() == first);
  const auto kept = pool.Take(1000);
  std::printf("in use: %d\n", pool.Take(1000).get() != first);
  const auto large = pool.Take(1900);  // fits only without the 1024 free bytes
  try {
    pool.Take(1900);
  } catch (const Error& error) {
    std::printf("error: %s\n", error.what());
  }
}

// Returned sends are available from the next pass on.
void Budget() {
  hvpipe::SendBudget budget(2);
  budget.BeginPass(1.0);
  budget.Take();
  budget.Take();
  budget.Return();
  std::printf("before the next pass: %d\n", budget.empty());
  budget.BeginPass(1.5);
  std::printf("after it: %d\n", budget.empty());
}

void Segments() {
  for (std::size_t i = 0; i < 3; ++i) {
    const hvpipe::Range range = hvpipe::SplitEvenly(8, 3, i);
    std::printf("%zu+%zu\n", range.first, range.count);
  }
  std::printf("%zu %zu %zu\n", hvpipe::SegmentsOf(0, 10), hvpipe::SegmentsOf(10, 10), hvpipe::SegmentsOf(11, 10));
}

}  // namespace

int main(int, char** argv) {
  const std::string wanted = argv[1];
  if (wanted == "posted") Posted();
  if (wanted == "pool") Pool();
  if (wanted == "budget") Budget();
  if (wanted == "segments") Segments();
  return 0;
}
