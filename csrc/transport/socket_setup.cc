// Sets the options of connections.
#include "transport/socket_setup.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace hvpipe {
namespace {

// What the kernel may hold of a connection that it has not sent yet, in bytes. An urgent bucket waits behind
// it; with less, the link would idle while the progress thread sleeps.
constexpr int kUnsentBytes = 1 << 20;

}  // namespace

void Tune(int socket) {
  const int on = 1;
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
}

}  // namespace hvpipe
