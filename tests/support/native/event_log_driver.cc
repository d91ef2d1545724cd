// Logs three events into a log that keeps two, then prints the kept events and the number dropped.
#include <cstdio>

#include "base/event_log.h"

int main() {
  hvpipe::EventLog log(true, 2), off(false, 2);
  for (const char* const name : {"a", "b", "c"}) {
    log.Add("pack", name, 0, 1);
    off.Add("pack", name, 0, 1);
  }
  std::printf("%zu dropped, off: %zu\n", log.dropped(), off.dropped());
  for (const auto& event : log.Take()) std::printf("%s\n", event.name.c_str());
  return 0;
}
