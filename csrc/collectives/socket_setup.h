// Makes the TCP connections between all ranks.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "collectives/text_messages.h"

namespace hvpipe {

// Where a rank listens.
struct SocketAddress {
  std::string host;  // a number: IPv4 or IPv6
  int port = 0;
};

// A socket to which other ranks connect. Closed by the destructor.
class SocketListener {
 public:
  // `host`: the address of one of this host's interfaces. The kernel chooses the port.
  explicit SocketListener(const std::string& host);
  ~SocketListener();
  SocketListener(const SocketListener&) = delete;
  SocketListener& operator=(const SocketListener&) = delete;

  const SocketAddress& address() const { return address_; }
  int socket() const { return socket_; }

 private:
  SocketAddress address_;
  int socket_ = -1;
};

// What ConnectSockets makes.
struct Sockets {
  int rank = 0;
  std::vector<int> connected;          // by rank; -1 for this rank
  std::vector<ProcessName> processes;  // by rank
};

// Connect to all lower ranks, and wait for all higher ones. Collective: every rank listens at its entry of
// `addresses` already. `token` is the same on all ranks, and nobody else should know it: it keeps strangers
// out. Throws the reason, with the ranks and the address, after at most `limit_s` seconds.
Sockets ConnectSockets(const SocketListener& listener, int rank, const std::vector<SocketAddress>& addresses,
                       const std::string& token, double limit_s);

}  // namespace hvpipe
