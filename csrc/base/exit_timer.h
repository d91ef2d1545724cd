// Ends the process if calls of MPI that nothing can interrupt do not return.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace hvpipe {

// Writes `message` to stderr, makes the file `abort_marker` unless its name is empty, and ends the process
// with code 1, without the handlers of exit, which would call MPI. By this file, `hvpipe run` ends the other
// ranks.
[[noreturn]] void EndProcess(const std::string& message, const std::string& abort_marker);

// Let this process end with its own exit code, or with 1 instead of 0, before handlers of exit that call MPI.
// Only C learns the code of a program that raises SystemExit. The launcher then ends the other ranks.
void FailAtExit();

// MPI_Init, MPI_Comm_dup, MPI_Finalize and their like wait for other ranks, and know no time limit.
class ExitTimer {
 public:
  // Calls EndProcess after `limit_s` seconds.
  ExitTimer(double limit_s, std::string message, std::string abort_marker);
  // Stops the timer.
  ~ExitTimer();
  ExitTimer(const ExitTimer&) = delete;
  ExitTimer& operator=(const ExitTimer&) = delete;

 private:
  void Wait(double limit_s);

  const std::string message_;
  const std::string abort_marker_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace hvpipe
