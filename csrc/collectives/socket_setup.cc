// Connects every pair of ranks: the higher rank calls, and both say who they are.
#include "collectives/socket_setup.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/error.h"
#include "core/event_log.h"

namespace hvpipe {
namespace {

constexpr std::size_t kTokenBytes = 32;
// What the kernel may hold of a connection that it has not sent yet, in bytes. An urgent bucket waits behind
// it; with less, the link would idle while the progress thread sleeps.
constexpr int kUnsentBytes = 1 << 20;

// The first thing that both ends of a connection say.
struct Hello {
  char product[8] = "hvpipe1";
  char token[kTokenBytes] = {};
  int rank = 0;
  ProcessName process;
};

std::string Described(const SocketAddress& address) {
  return address.host + ", port " + std::to_string(address.port);
}

[[noreturn]] void Fail(const std::string& what, const std::string& received) {
  throw Error(
      what +
          " TCP must be open between all hosts of the job, at all ports; with several networks, choose "
          "one by `hvpipe run --net`, HVPIPE_NET or `horovodrun --network-interfaces`. Received: " +
          received,
      ErrorKind::kPeer);
}

struct FreeAddresses {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses Parse(const SocketAddress& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (code != 0) {
    throw Error(
        "An address should be an IPv4 or IPv6 number. Received: " + address.host + ": " + gai_strerror(code),
        ErrorKind::kUsage);
  }
  return Addresses(found);
}

// A socket that is closed unless Release was called.
class Owned {
 public:
  explicit Owned(int socket = -1) : socket_(socket) {}
  ~Owned() {
    if (socket_ >= 0) close(socket_);
  }
  Owned(Owned&& other) noexcept : socket_(other.Release()) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  int get() const { return socket_; }
  int Release() { return std::exchange(socket_, -1); }

 private:
  int socket_;
};

// Wait until the socket is ready, at most until the deadline.
bool WaitFor(int socket, short events, double deadline_s) {
  for (;;) {
    const double left_s = deadline_s - Now();
    if (left_s <= 0) return false;
    pollfd waits{socket, events, 0};
    const int found = poll(&waits, 1, static_cast<int>(std::min(left_s, 60.0) * 1000) + 1);
    if (found > 0) return true;
  }
}

// Send or receive all bytes. Returns "" or why not.
template <typename Transfer>
std::string All(int socket, short events, std::size_t bytes, double deadline_s, const Transfer& transfer) {
  for (std::size_t done = 0; done < bytes;) {
    if (!WaitFor(socket, events, deadline_s)) return "no answer";
    const ssize_t count = transfer(done, bytes - done);
    if (count == 0) return "the end of its data";
    if (count < 0 && errno != EAGAIN && errno != EINTR) return std::strerror(errno);
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return "";
}

std::string SendHello(int socket, Hello hello, double deadline_s) {
  return All(socket, POLLOUT, sizeof hello, deadline_s, [&](std::size_t done, std::size_t left) {
    return send(socket, reinterpret_cast<const char*>(&hello) + done, left, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
}

std::string ReceiveHello(int socket, Hello& hello, const Hello& own, double deadline_s) {
  std::string why = All(socket, POLLIN, sizeof hello, deadline_s, [&](std::size_t done, std::size_t left) {
    return recv(socket, reinterpret_cast<char*>(&hello) + done, left, MSG_DONTWAIT);
  });
  const bool known = std::memcmp(hello.product, own.product, sizeof own.product) == 0 &&
                     std::memcmp(hello.token, own.token, sizeof own.token) == 0;
  return why.empty() && !known ? "another program's data" : why;
}

void Tune(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
}

// A connection that the other end may not have accepted yet.
Owned Call(const SocketAddress& address, double deadline_s, std::string& why) {
  const Addresses found = Parse(address);
  Owned made(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (made.get() < 0 ||
      (connect(made.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS)) {
    why = std::strerror(errno);
    return Owned();
  }
  if (!WaitFor(made.get(), POLLOUT, deadline_s)) {
    why = "no answer";
    return Owned();
  }
  int code = 0;
  socklen_t bytes = sizeof code;
  getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &code, &bytes);
  if (code == 0) return made;
  why = std::strerror(code);
  return Owned();
}

}  // namespace

SocketListener::SocketListener(const std::string& host) : address_{host, 0} {
  const Addresses found = Parse(address_);
  socket_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  const bool listens = socket_ >= 0 && bind(socket_, found->ai_addr, found->ai_addrlen) == 0 &&
                       listen(socket_, SOMAXCONN) == 0 &&
                       getsockname(socket_, reinterpret_cast<sockaddr*>(&own), &bytes) == 0;
  if (!listens) {
    const std::string why = std::strerror(errno);
    if (socket_ >= 0) close(socket_);
    throw Error("A rank should be able to listen at its address. Received: " + host + ": " + why,
                ErrorKind::kUsage);
  }
  const in_port_t port = own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&own)->sin6_port
                                                   : reinterpret_cast<const sockaddr_in*>(&own)->sin_port;
  address_.port = ntohs(port);
}

SocketListener::~SocketListener() { close(socket_); }

Sockets ConnectSockets(const SocketListener& listener, int rank, const std::vector<SocketAddress>& addresses,
                       const std::string& token, double limit_s) {
  const double deadline_s = Now() + limit_s;
  const int size = static_cast<int>(addresses.size());
  std::vector<Owned> connected(addresses.size());
  std::vector<ProcessName> processes(addresses.size());
  Hello own;
  std::memcpy(own.token, token.data(), std::min(token.size(), kTokenBytes));
  own.rank = rank;
  own.process = processes[static_cast<std::size_t>(rank)] = ProcessName::Own();
  const auto who = "Rank " + std::to_string(rank) + " on " + own.process.host;
  const auto name = [&](int peer) {
    return "rank " + std::to_string(peer) + " at " + Described(addresses[static_cast<std::size_t>(peer)]);
  };
  // Nobody waits here for what a higher rank does, so no two ranks wait for each other.
  // Each begins with another one, so that not all call rank 0 at once.
  for (int peer = rank - 1; peer >= 0; --peer) {
    const auto at = static_cast<std::size_t>(peer);
    std::string why;
    connected[at] = Call(addresses[at], deadline_s, why);
    if (why.empty()) why = SendHello(connected[at].get(), own, deadline_s);
    if (!why.empty()) Fail(who + " should reach " + name(peer) + ".", why);
  }
  for (int left = size - 1 - rank; left > 0;) {
    if (!WaitFor(listener.socket(), POLLIN, deadline_s)) {
      int peer = rank + 1;
      while (connected[static_cast<std::size_t>(peer)].get() >= 0) ++peer;
      Fail("Rank " + std::to_string(peer) + " should reach rank " + std::to_string(rank) + " on " +
               own.process.host + ".",
           "no call within " + std::to_string(static_cast<int>(limit_s)) + " s");
    }
    Owned accepted(accept4(listener.socket(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (accepted.get() < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS))
      Fail(who + " should be able to accept the calls of " + std::to_string(size - 1 - rank) + " ranks.",
           std::strerror(errno));
    if (accepted.get() < 0) continue;
    Hello theirs;
    // A stranger that says nothing may not hold up the others for long.
    const double patience_s = std::min(deadline_s, Now() + 5);
    if (!ReceiveHello(accepted.get(), theirs, own, patience_s).empty()) continue;
    const bool expected = theirs.rank > rank && theirs.rank < size &&
                          connected[static_cast<std::size_t>(theirs.rank)].get() < 0;
    if (!expected || !SendHello(accepted.get(), own, deadline_s).empty()) continue;
    processes[static_cast<std::size_t>(theirs.rank)] = theirs.process;
    connected[static_cast<std::size_t>(theirs.rank)] = std::move(accepted);
    --left;
  }
  for (int peer = 0; peer < rank; ++peer) {
    Hello theirs;
    std::string why = ReceiveHello(connected[static_cast<std::size_t>(peer)].get(), theirs, own, deadline_s);
    if (why.empty() && theirs.rank != peer) why = "the answer of rank " + std::to_string(theirs.rank);
    if (!why.empty()) Fail(who + " should reach " + name(peer) + ".", why);
    processes[static_cast<std::size_t>(peer)] = theirs.process;
  }
  Sockets result{rank, {}, std::move(processes)};
  for (Owned& one : connected) {
    if (one.get() >= 0) Tune(one.get());
    result.connected.push_back(one.Release());
  }
  return result;
}

}  // namespace hvpipe
