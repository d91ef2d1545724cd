// Writes the ring buffer of events, and records what ended the process.
#include "base/flight_recorder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/error.h"

namespace hvpipe {
namespace {

constexpr char kMagic[] = "HVPFLGHT";

template <std::size_t size>
void CopyText(char (&target)[size], std::string_view text) {
  const std::size_t count = std::min(text.size(), size - 1);
  std::memcpy(target, text.data(), count);
  std::memset(target + count, 0, size - count);
}

void* MapFile(const std::string& path, std::size_t bytes) {
  // A file of its own, never what another user's link leads to.
  unlink(path.c_str());
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  // Reserved now: a full disk would otherwise end the process with SIGBUS.
  int problem = file < 0 ? errno : posix_fallocate(file, 0, static_cast<off_t>(bytes));
  void* memory = MAP_FAILED;
  if (problem == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) problem = errno;
  }
  if (file >= 0) close(file);
  if (problem == 0) return memory;
  unlink(path.c_str());
  throw Error("The flight recorder could not create its file " + path + " of " + std::to_string(bytes) +
                  " bytes: " + std::strerror(problem),
              ErrorKind::kUsage);
}

// The signals that are recorded, and their previous handlers.
constexpr std::array<int, 10> kMarked = {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU,
                                         SIGSEGV, SIGBUS, SIGFPE,  SIGILL,  SIGABRT};
constexpr bool IsCrash(int number) {
  return number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL || number == SIGABRT;
}
std::array<struct sigaction, kMarked.size()> previous;
std::atomic<FlightRecorder*> active{nullptr};

}  // namespace

FlightRecorder::FlightRecorder(const std::string& path) : path_(path) {
  void* memory = path.empty()
                     ? mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                     : MapFile(path, sizeof(File));
  if (memory == MAP_FAILED) throw std::bad_alloc();
  file_ = static_cast<File*>(memory);
  Header& header = file_->header;
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.version = 1;
  header.events = kEvents;
  header.event_bytes = sizeof(Event);
  header.pid = static_cast<std::int32_t>(getpid());
  header.began_s = header.beat_s = Now();
  const auto unix_time = std::chrono::system_clock::now().time_since_epoch();
  header.unix_s = std::chrono::duration<double>(unix_time).count() - header.began_s;
  gethostname(header.host, sizeof header.host - 1);
}

FlightRecorder::~FlightRecorder() {
  FlightRecorder* own = this;
  active.compare_exchange_strong(own, nullptr);
  munmap(file_, sizeof(File));
}

void FlightRecorder::SetRank(int rank, int size) {
  file_->header.rank = rank;
  file_->header.size = size;
}

void FlightRecorder::Add(Flight kind, std::string_view what, std::uint64_t sequence, double at_s) {
  if (kind == Flight::kStep) file_->header.steps.fetch_add(1, std::memory_order_relaxed);
  if (!records_.load(std::memory_order_relaxed)) return;
  const std::uint64_t number = file_->header.next.fetch_add(1, std::memory_order_relaxed);
  Event& event = file_->events[number % kEvents];
  event.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  event.at_s = at_s;
  event.sequence = sequence;
  event.kind = static_cast<std::uint32_t>(kind);
  CopyText(event.what, what);
  event.number.store(number + 1, std::memory_order_release);
}

void FlightRecorder::Beat(std::uint64_t operations) {
  Header& header = file_->header;
  header.operations = operations;
  const double now = Now();
  NoticeFreeze(now);
  header.beat_s = now;
  if (header.signal == SIGTERM && header.ending == 0 && header.ended_s > 0 &&
      now - header.ended_s > kHandledS) {
    header.signal = 0;
    header.ended_s = 0;
  }
}

void FlightRecorder::NoticeFreeze(double now) {
  Header& header = file_->header;
  if (now - header.beat_s < kFrozenS) return;
  header.frozen_s = header.beat_s;
  header.thawed_s = now;
}

void FlightRecorder::End(std::string_view why) {
  Header& header = file_->header;
  if (header.ending.exchange(1) != 0) return;
  CopyText(header.why, why);
  header.ended_s = Now();
  NoticeFreeze(header.ended_s);
}

void FlightRecorder::Close() {
  if (!path_.empty()) unlink(path_.c_str());
  path_.clear();
}

// If somebody handles SIGTERM, the rank may go on: the next End counts, and the handler is called. Otherwise
// this restores the previous handler, and raises the signal again for it.
void FlightRecorder::OnSignal(int number) {
  const auto place =
      static_cast<std::size_t>(std::find(kMarked.begin(), kMarked.end(), number) - kMarked.begin());
  const auto handler = previous[place].sa_handler;
  const bool handled = !IsCrash(number) && handler != SIG_DFL;
  FlightRecorder* const recorder = active.load();
  if (recorder != nullptr && recorder->file_->header.pid == getpid()) {
    Header& header = recorder->file_->header;
    // A rank that has handled SIGTERM may end by another signal.
    if (header.signal == 0 || (!handled && header.ending == 0)) {
      recorder->NoticeFreeze(Now());
      if (handled ? header.ending == 0 : header.ending.exchange(1) == 0) header.ended_s = Now();
      header.signal = number;
    }
  }
  if (handled) return handler(number);
  sigaction(number, &previous[place], nullptr);
  raise(number);
}

void FlightRecorder::MarkSignals() {
  FlightRecorder* const before = active.exchange(this);
  if (before != nullptr && before != this) return;  // the handlers are there
  struct sigaction action = {};
  action.sa_handler = &OnSignal;
  action.sa_flags = SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kMarked.size(); ++i) {
    struct sigaction now = {};
    sigaction(kMarked[i], nullptr, &now);
    if (now.sa_handler == &OnSignal && (now.sa_flags & SA_SIGINFO) == 0) continue;
    const bool own =
        now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN && (now.sa_flags & SA_SIGINFO) == 0;
    const bool wraps = kMarked[i] == SIGTERM && own;
    if (!IsCrash(kMarked[i]) && now.sa_handler != SIG_DFL && !wraps) continue;
    previous[i] = now;
    sigaction(kMarked[i], &action, nullptr);
  }
}

}  // namespace hvpipe
