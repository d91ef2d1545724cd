// Collects what ranks wait for and do, and puts it into words.
#include "progress/watchdog.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include "base/stack_dump.h"

namespace hvpipe {
namespace {

enum Kind : int { kStalled = 1, kAcknowledged, kAsk, kAnswer, kStatus };

constexpr std::chrono::milliseconds kPeriod(200);
constexpr double kAcknowledgeS = 1;
constexpr double kCollectS = 0.5;
constexpr double kAnswerS = 1;
constexpr std::size_t kMostAsked = 32;
constexpr std::size_t kMostStackBytes = 6000;
constexpr int kDumps = 3;  // a copy of a busy process may crash
constexpr std::chrono::milliseconds kDumpLimit(300);
constexpr char kBetween = '\x1f';
constexpr double kLostS = 2;
constexpr double kJustCame = 1;  // a rank that waits for less has just come

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

std::string Encode(const Stall& stall) {
  std::string text = std::to_string(stall.waited_s) + kBetween + stall.what + kBetween + stall.waiting;
  for (const int rank : stall.ranks) text += kBetween + std::to_string(rank);
  return text;
}

Stall Decode(const std::string& text) {
  std::istringstream fields(text);
  std::string waited, rank;
  Stall stall;
  std::getline(fields, waited, kBetween);
  std::getline(fields, stall.what, kBetween);
  std::getline(fields, stall.waiting, kBetween);
  stall.waited_s = std::strtod(waited.c_str(), nullptr);
  while (std::getline(fields, rank, kBetween)) stall.ranks.push_back(std::atoi(rank.c_str()));
  return stall;
}

// Whether one of the stalled calls needs this rank.
bool IsNeeded(int rank, const std::map<int, Stall>& stalled) {
  return std::any_of(stalled.begin(), stalled.end(), [&](const auto& each) {
    const std::vector<int>& ranks = each.second.ranks;
    return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
}

// Python lists its threads from the newest to the oldest. The main thread is the oldest.
std::string MainThreadFirst(const std::string& text) {
  std::vector<std::string> threads;
  for (std::size_t start = 0; start < text.size();) {
    std::size_t end = text.find("\n\n", start);
    end = end == std::string::npos ? text.size() : end;
    threads.push_back(text.substr(start, end - start));
    start = end + 2;
  }
  std::string sorted;
  for (auto thread = threads.rbegin(); thread != threads.rend(); ++thread) {
    std::istringstream lines(*thread);
    for (std::string line; std::getline(lines, line);) {
      if (!line.empty()) sorted += "    " + line + "\n";
    }
  }
  return sorted.substr(0, kMostStackBytes);
}

// The state of a process as in `ps`: "T" is stopped, "Z" has ended. 0 if it cannot be read.
char StateOf(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const std::size_t name = text.rfind(") ");
  return name == std::string::npos || name + 2 >= text.size() ? '\0' : text[name + 2];
}

// Certain: a process that only cannot be looked at (without a free file descriptor, say) has not ended.
bool HasEnded(int pid) { return (kill(pid, 0) != 0 && errno == ESRCH) || StateOf(pid) == 'Z'; }

Error LostProcess(const std::string& rank) {
  return Error(
      "The process of " + rank + " has ended, while this rank waits for others. Was it killed " +
          "(SIGKILL, or the host's memory was used up)? See what it printed last, and the system's log.",
      ErrorKind::kPeer);
}

}  // namespace

Watchdog::Watchdog(TextMessages& texts, Telemetry& telemetry, WaitsNow waits_now, Lost lost)
    : texts_(texts),
      telemetry_(telemetry),
      waits_now_(std::move(waits_now)),
      lost_(std::move(lost)),
      thread_([this] { Loop(); }) {}

void Watchdog::Report(const Stall& stall) {
  telemetry_.flight.Add(Flight::kStalled, stall.what + ": " + stall.waiting, stall.sequence);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reported_ = stall;
  }
  wake_.notify_all();
}

void Watchdog::UseStacks(int signal, int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stack_signal_ = signal;
  stack_file_ = file;
}

void Watchdog::TellRank0(std::string status) {
  if (texts_.rank() == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  status_ = std::move(status);
}

std::vector<std::string> Watchdog::TakeStatuses() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> taken;
  for (auto& [rank, status] : statuses_) taken.push_back(std::move(status));
  statuses_.clear();
  return taken;
}

void Watchdog::Watch(bool on) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    watches_ = on;
  }
  wake_.notify_all();
}

std::string Watchdog::report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return report_;
}

void Watchdog::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Loop() {
  bool works = true;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || watches_; });
      wake_.wait_for(lock, kPeriod, [&] { return stop_ || reported_; });
      if (stop_) return;
    }
    telemetry_.flight.Beat(telemetry_.counters.operations.value());
    try {
      if (works) Step(Now());
    } catch (const std::exception& failure) {  // the ranks that it would ask may be gone
      works = false;
      telemetry_.flight.Add(Flight::kNote, std::string("no stall reports: ") + failure.what(), 0);
    }
    if (!works) {
      const std::lock_guard<std::mutex> lock(mutex_);
      reported_.reset();
    }
  }
}

void Watchdog::LookForLost(double now) {
  if (now - looked_s_ < kLostS) return;
  looked_s_ = now;
  const auto wait = waits_now_();
  if (!wait || wait->waited_s < kLostS) return;
  for (int rank = 0; rank < texts_.size(); ++rank) {
    const int pid = texts_.LocalPid(rank);
    if (pid == 0 || !HasEnded(pid)) continue;
    looked_s_ = std::numeric_limits<double>::infinity();
    return lost_(LostProcess(texts_.NameOf(rank)));
  }
}

void Watchdog::Step(double now) {
  LookForLost(now);
  TakeStall(now);
  SendStatus();
  while (const auto message = texts_.Receive()) Take(*message, now);
  if (own_ && now - told_s_ > kAcknowledgeS) {
    ++told_;
    TakeStall(now);
  }
  if (collects_s_ != 0 && asked_s_ == 0 && now - collects_s_ > kCollectS) {
    asked_s_ = now;
    AskNeeded();
  }
  if (asked_s_ == 0) return;
  bool complete = true;
  for (const auto& [rank, text] : answers_) complete = complete && !text.empty();
  if (complete && AskNeeded()) {  // those that answered wait themselves, for others
    asked_s_ = now;
    return;
  }
  if (complete || now - asked_s_ > kAnswerS) Finish();
}

// The ranks that are known to wait.
std::map<int, Stall> Watchdog::Waiting() const {
  std::map<int, Stall> waiting = stalled_;
  for (const auto& [rank, answer] : answers_) {
    if (answer.substr(0, 1) == "W") waiting[rank] = Decode(answer.substr(1));
  }
  return waiting;
}

// Ask the ranks that others wait for, unless they are known to wait or were asked. Returns whether any was.
bool Watchdog::AskNeeded() {
  const std::map<int, Stall> waiting = Waiting();
  bool asked = false;
  for (int rank = 0; rank < texts_.size() && answers_.size() < kMostAsked; ++rank) {
    if (waiting.count(rank) != 0 || answers_.count(rank) != 0 || !IsNeeded(rank, waiting)) continue;
    asked = true;
    if (rank == texts_.rank()) {
      answers_[rank] = Answer();
    } else {
      answers_[rank] = "";
      texts_.Send(rank, kAsk, "");
    }
  }
  return asked;
}

// Pass this rank's stall on, or collect here.
void Watchdog::TakeStall(double now) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reported_) {
      own_ = std::exchange(reported_, std::nullopt);
      told_ = 0;
      sent_to_ = -1;
    }
  }
  if (!own_) return;
  if (told_ < texts_.rank()) {
    if (told_ != sent_to_) {
      sent_to_ = told_;
      told_s_ = now;
      texts_.Send(told_, kStalled, Encode(*own_));
    }
    return;
  }
  Collect(texts_.rank(), *own_, now);
  own_.reset();
}

void Watchdog::SendStatus() {
  std::optional<std::string> status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status.swap(status_);
  }
  if (status) texts_.Send(0, kStatus, *status);
}

void Watchdog::Take(const TextMessage& message, double now) {
  switch (message.kind) {
    case kStalled:
      texts_.Send(message.rank, kAcknowledged, "");
      return Collect(message.rank, Decode(message.text), now);
    case kAcknowledged:
      own_.reset();
      return;
    case kAsk:
      return texts_.Send(message.rank, kAnswer, Answer());
    case kStatus: {
      const std::lock_guard<std::mutex> lock(mutex_);
      statuses_[message.rank] = message.text;
      return;
    }
    default:
      if (answers_.count(message.rank) != 0) answers_[message.rank] = message.text;
  }
}

void Watchdog::Collect(int rank, const Stall& stall, double now) {
  // The last report has said that it waits, and it has waited ever since.
  const auto reported = reported_s_.find(rank);
  if (reported != reported_s_.end() && now - stall.waited_s < reported->second) return;
  stalled_[rank] = stall;
  if (collects_s_ == 0) collects_s_ = now;
}

// "W": it waits as well; "L": it is late.
std::string Watchdog::Answer() {
  const auto waits = waits_now_();
  if (waits && !waits->patient && waits->waited_s > kJustCame) return "W" + Encode(*waits);
  return "L" + Stacks();
}

std::string Watchdog::Stacks() {
  int number = 0, file = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = stack_signal_;
    file = stack_file_;
  }
  if (file < 0) return "    (no Python stack)\n";
  std::string text;
  for (int attempt = 0; attempt < kDumps && text.empty(); ++attempt) {
    if (lseek(file, 0, SEEK_SET) != 0 || ftruncate(file, 0) != 0) break;
    const bool whole = HandleInCopy(number, kDumpLimit);
    text.resize(4 * kMostStackBytes);
    const ssize_t bytes = pread(file, text.data(), text.size(), 0);
    text.resize(bytes > 0 && (whole || attempt == kDumps - 1) ? static_cast<std::size_t>(bytes) : 0);
  }
  return text.empty() ? "    (no Python stack)\n" : MainThreadFirst(text);
}

void Watchdog::Finish() {
  const std::string text = ReportText();
  stalled_.clear();
  answers_.clear();
  collects_s_ = asked_s_ = 0;
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
  const std::lock_guard<std::mutex> lock(mutex_);
  report_ = text;
}

std::string Watchdog::SilentRank(int rank) const {
  const int pid = texts_.LocalPid(rank);
  if (pid != 0 && HasEnded(pid)) return "has ended";
  const char state = pid != 0 ? StateOf(pid) : '\0';
  if (state == 'T' || state == 't') return "is stopped (by SIGSTOP or a debugger)";
  return "does not answer: its host or the link to it may be down, or the process is frozen";
}

std::string Watchdog::ReportText() {
  const std::map<int, Stall> waiting = Waiting();
  std::vector<std::string> late;
  for (const auto& [rank, answer] : answers_) {
    if (waiting.count(rank) != 0) continue;
    if (answer.empty()) {
      late.push_back("  MISSING: " + texts_.NameOf(rank) + " " + SilentRank(rank) + ".\n");
    } else {
      late.push_back("  MISSING: " + texts_.NameOf(rank) + ". Its Python threads, the main one first:\n" +
                     answer.substr(1));
    }
  }
  std::ostringstream text;
  text << "\nhvpipe: stall: " << waiting.size() << " of " << texts_.size() << " ranks wait for the others.\n";
  int shown = 0;
  for (const auto& [rank, stall] : waiting) {
    reported_s_[rank] = Now();
    if (++shown > 8) continue;
    text << "  " << texts_.NameOf(rank) << " has waited " << Seconds(stall.waited_s) << " in " << stall.what
         << " for " << stall.waiting << ".\n";
  }
  if (shown > 8) text << "  ... and " << shown - 8 << " more.\n";
  for (const auto& line : late) text << line;
  if (late.empty()) {
    text << "  No rank is busy: a link between two of them is down or slow, or they wait for different "
            "things.\n";
  }
  text << std::flush;
  return text.str();
}

}  // namespace hvpipe
