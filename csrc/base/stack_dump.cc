// Copies the process by the system call alone. fork() would run other libraries' handlers, which take locks.
#include "base/stack_dump.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <initializer_list>
#include <thread>

namespace hvpipe {
namespace {

// In the copy, which has this thread only. glibc remembers the numbers of the original.
[[noreturn]] void Handle(int signal) {
  prctl(PR_SET_DUMPABLE, 0);  // no core file
  struct sigaction usual = {};
  usual.sa_handler = SIG_DFL;
  for (const int crash : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) sigaction(crash, &usual, nullptr);
  syscall(SYS_tgkill, syscall(SYS_getpid), syscall(SYS_gettid), signal);  // handled before it returns
  _exit(0);
}

}  // namespace

bool HandleInCopy(int signal, std::chrono::milliseconds limit) {
  // No exit signal: SIGCHLD is for the children that the program itself starts.
  const long copy = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (copy == 0) Handle(signal);
  if (copy < 0) return false;
  const auto end = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (waitpid(static_cast<pid_t>(copy), &status, __WALL | WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) kill(static_cast<pid_t>(copy), SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace hvpipe
