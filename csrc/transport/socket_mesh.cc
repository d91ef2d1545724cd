// Reads and writes messages without blocking, and matches them with receives.
#include "transport/socket_mesh.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

#include "base/error.h"
#include "base/event_log.h"

namespace hvpipe {
namespace {

// A copy of fewer bytes costs less than another look at the socket.
constexpr std::size_t kLeaveInKernelBytes = 16'384;
constexpr std::size_t kMessagesPerWrite = 8;

// The index of this rank in `ranks`.
int PlaceOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Remove and return the oldest element of a key. A key without elements is removed: tags are many.
template <typename Map>
auto TakeFirst(Map& map, typename Map::iterator at) {
  auto first = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) map.erase(at);
  return first;
}

}  // namespace

SocketMesh::SocketMesh(const Sockets& sockets)
    : rank_(sockets.rank),
      processes_(sockets.processes),
      poller_(epoll_create1(EPOLL_CLOEXEC)),
      connections_(sockets.connected.size()) {
  for (int peer = 0; peer < size(); ++peer)
    At(peer).socket = sockets.connected[static_cast<std::size_t>(peer)];
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = peer;
    if (epoll_ctl(poller_, EPOLL_CTL_ADD, At(peer).socket, &event) == 0) continue;
    const std::string why = std::strerror(errno);
    CloseSockets();
    throw Error("epoll cannot watch a connection: " + why);
  }
}

SocketMesh::Channel SocketMesh::NewChannels() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(next_channel_, next_channel_ + (Channel{1} << 32));
}

SocketMesh::~SocketMesh() { CloseSockets(); }

void SocketMesh::CloseSockets() {
  for (const Connection& connection : connections_) {
    if (connection.socket >= 0) close(connection.socket);
  }
  close(poller_);
}

Ticket SocketMesh::NewTicket() {
  if (free_.empty()) {
    done_.push_back(0);
    return static_cast<Ticket>(done_.size() - 1);
  }
  const Ticket ticket = free_.back();
  free_.pop_back();
  return ticket;
}

void SocketMesh::CheckConnected(int peer) {
  const Connection& connection = At(peer);
  if (connection.ended.empty()) return;
  throw Error("Lost connection to rank " + std::to_string(peer) +
                  " (it ended, or the network is down): " + connection.ended,
              ErrorKind::kPeer);
}

Ticket SocketMesh::Send(const void* data, std::size_t bytes, int peer, Channel channel, int tag,
                        CompletesWhen when) {
  const std::lock_guard<std::mutex> lock(mutex_);
  CheckConnected(peer);
  Connection& connection = At(peer);
  const bool confirm = when == CompletesWhen::kReceived;
  const Header header{channel, bytes, tag, confirm ? Kind::kDataToConfirm : Kind::kData};
  const Ticket ticket = NewTicket();
  const bool waits = !connection.outgoing.empty();
  connection.outgoing.push_back({header, static_cast<const char*>(data), ticket});
  if (confirm) connection.unconfirmed[{channel, tag}].push_back(ticket);
  if (!waits) Write(connection);  // otherwise the kernel was full
  return ticket;
}

Ticket SocketMesh::Receive(void* data, std::size_t bytes, int peer, Channel channel, int tag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Connection& connection = At(peer);
  const Posted posted{static_cast<char*>(data), bytes, NewTicket()};
  const auto arrived = connection.arrived.find({channel, tag});
  if (arrived == connection.arrived.end() || arrived->second.front().receive) {
    CheckConnected(peer);
    connection.posted[{channel, tag}].push_back(posted);
    return posted.ticket;
  }
  Arrival& oldest = arrived->second.front();
  if (oldest.complete) {
    Deliver(connection, TakeFirst(connection.arrived, arrived), posted);
    Write(connection);
  } else {
    oldest.receive = posted;
  }
  return posted.ticket;
}

bool SocketMesh::Test(Ticket ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  char& done = done_[static_cast<std::size_t>(ticket)];
  if (done == 0) return false;
  done = 0;
  free_.push_back(ticket);
  const auto misfit = misfits_.find(ticket);
  if (misfit == misfits_.end()) return true;
  const Error error(misfit->second, ErrorKind::kMismatch);
  misfits_.erase(misfit);
  throw error;
}

bool SocketMesh::Probe(int peer, Channel channel, int tag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto arrived = At(peer).arrived.find({channel, tag});
  return arrived != At(peer).arrived.end() && arrived->second.front().complete &&
         !arrived->second.front().receive;
}

void SocketMesh::Poll() {
  const std::lock_guard<std::mutex> lock(mutex_);
  PollLocked();
  for (int peer = 0; peer < size(); ++peer) {
    const Connection& connection = At(peer);
    const Incoming& in = connection.incoming;
    const bool expected = in.arrival == nullptr
                              ? in.ticket != kNoTicket
                              : in.arrival->receive && in.arrival->receive->ticket != kNoTicket;
    const bool needed = expected || !connection.posted.empty() || !connection.outgoing.empty() ||
                        !connection.unconfirmed.empty();
    if (needed) CheckConnected(peer);
  }
}

void SocketMesh::PollLocked() {
  // One that was left in the kernel need not be readable: only its header may have come.
  for (Connection& connection : connections_) {
    if (connection.incoming.left_once) Read(connection);
  }
  std::array<epoll_event, 64> events;
  const int found = epoll_wait(poller_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < found; ++i) {
    Connection& connection = At(events[static_cast<std::size_t>(i)].data.fd);
    if (!connection.incoming.left_once) Read(connection);
  }
  for (Connection& connection : connections_) Write(connection);
}

// Read all that is there, each time the rest of a message together with the next header.
void SocketMesh::Read(Connection& connection) {
  Incoming& in = connection.incoming;
  bool drained = false;
  for (;;) {
    if (in.header_bytes == sizeof(Header) && !in.matched) {
      in.matched = Match(connection);
      in.left_once = !in.matched;
      if (!in.matched) return;
      if (in.bytes == in.header.bytes) {
        FinishMessage(connection);
        continue;
      }
    }
    if (drained || !connection.ended.empty()) return;
    std::array<iovec, 2> parts{};
    msghdr message{};
    message.msg_iov = parts.data();
    if (in.matched) {
      parts = {{{in.target + in.bytes, in.header.bytes - in.bytes}, {&in.next, sizeof(Header)}}};
      message.msg_iovlen = 2;
    } else {
      parts[0] = {reinterpret_cast<char*>(&in.header) + in.header_bytes, sizeof(Header) - in.header_bytes};
      message.msg_iovlen = 1;
    }
    const ssize_t got = recvmsg(connection.socket, &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) return Lose(connection, got == 0 ? "the end of its data" : std::strerror(errno));
    const auto count = static_cast<std::size_t>(got);
    drained = count < parts[0].iov_len + parts[1].iov_len;
    if (!in.matched) {
      in.header_bytes += count;
      continue;
    }
    const std::size_t ours = std::min(count, in.header.bytes - in.bytes);
    moved_[in.header.channel] += ours;
    in.bytes += ours;
    if (in.bytes < in.header.bytes) continue;
    const Header next = in.next;
    FinishMessage(connection);
    in.header = next;
    in.header_bytes = count - ours;
  }
}

// Choose where the message that begins goes. False: it stays in the kernel for a pass.
bool SocketMesh::Match(Connection& connection) {
  Incoming& in = connection.incoming;
  const Header& header = in.header;
  const Key key{header.channel, header.tag};
  if (header.kind == Kind::kConfirmation) {
    const auto sent = connection.unconfirmed.find(key);
    if (sent == connection.unconfirmed.end()) throw Error("A message was confirmed that was not sent.");
    End(TakeFirst(connection.unconfirmed, sent));
    return true;
  }
  const auto posted = connection.posted.find(key);
  if (posted != connection.posted.end()) {
    const Posted receive = TakeFirst(connection.posted, posted);
    // Any thread may poll, so the error is for the one that tests the ticket.
    const std::string misfit = Misfit(header, receive, static_cast<int>(&connection - connections_.data()));
    if (!misfit.empty()) misfits_[receive.ticket] = misfit;
    const bool dropped = !misfit.empty() || receive.data == nullptr;
    if (dropped && header.bytes > 0) in.dropped = std::make_unique<char[]>(header.bytes);
    in.target = in.dropped ? in.dropped.get() : receive.data;
    in.ticket = receive.ticket;
    return true;
  }
  if (header.bytes > kLeaveInKernelBytes && !in.left_once) return false;
  Arrival arrival{std::make_unique<char[]>(header.bytes), header};
  auto& arrived = connection.arrived[key];
  arrived.push_back(std::move(arrival));
  in.arrival = &arrived.back();
  in.target = in.arrival->data.get();
  return true;
}

std::string SocketMesh::Misfit(const Header& header, const Posted& receive, int peer) {
  if (header.bytes <= receive.bytes) return "";
  return "A message from rank " + std::to_string(peer) + " should have at most " +
         std::to_string(receive.bytes) + " bytes. Received: " + std::to_string(header.bytes);
}

void SocketMesh::FinishMessage(Connection& connection) {
  const Incoming in = std::exchange(connection.incoming, Incoming());
  if (in.header.kind == Kind::kConfirmation) return;
  if (in.arrival == nullptr) return Deliver(connection, in.header, in.ticket);
  in.arrival->complete = true;
  if (!in.arrival->receive) return;
  const auto at = connection.arrived.find({in.header.channel, in.header.tag});
  const Arrival message = TakeFirst(connection.arrived, at);
  Deliver(connection, message, *message.receive);
}

void SocketMesh::Deliver(Connection& connection, const Arrival& message, const Posted& receive) {
  const auto peer = static_cast<int>(&connection - connections_.data());
  const std::string misfit = Misfit(message.header, receive, peer);
  if (!misfit.empty()) {
    misfits_[receive.ticket] = misfit;
  } else if (receive.data != nullptr && message.header.bytes > 0) {
    std::memcpy(receive.data, message.data.get(), message.header.bytes);
  }
  Deliver(connection, message.header, receive.ticket);
}

void SocketMesh::End(Ticket ticket) {
  if (ticket != kNoTicket) done_[static_cast<std::size_t>(ticket)] = 1;
}

// A receive has its message. A confirmation goes before all messages that have not begun.
void SocketMesh::Deliver(Connection& connection, const Header& header, Ticket ticket) {
  End(ticket);
  if (header.kind != Kind::kDataToConfirm || !connection.ended.empty()) return;
  auto& outgoing = connection.outgoing;
  const bool begun = !outgoing.empty() && outgoing.front().written > 0;
  outgoing.insert(begun ? std::next(outgoing.begin()) : outgoing.begin(),
                  Outgoing{{header.channel, 0, header.tag, Kind::kConfirmation}});
}

void SocketMesh::Write(Connection& connection) {
  auto& outgoing = connection.outgoing;
  while (!outgoing.empty() && connection.ended.empty()) {
    std::array<iovec, 2 * kMessagesPerWrite> parts;
    std::size_t count = 0, wanted = 0;
    for (Outgoing& one : outgoing) {
      if (count + 2 > parts.size()) break;
      const std::size_t of_header = std::min(one.written, sizeof(Header));
      const std::size_t of_data = one.written - of_header;
      if (of_header < sizeof(Header))
        parts[count++] = {reinterpret_cast<char*>(&one.header) + of_header, sizeof(Header) - of_header};
      if (of_data < one.header.bytes)
        parts[count++] = {const_cast<char*>(one.data) + of_data, one.header.bytes - of_data};
      wanted += sizeof(Header) + one.header.bytes - one.written;
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(connection.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) return;
    if (sent < 0) {
      const std::string why = std::strerror(errno);
      Read(connection);  // what the other end has sent before
      if (connection.incoming.left_once) Read(connection);
      if (connection.ended.empty()) Lose(connection, why);
      return;
    }
    for (auto left = static_cast<std::size_t>(sent); left > 0;) {
      Outgoing& first = outgoing.front();
      const std::size_t rest = sizeof(Header) + first.header.bytes - first.written;
      const std::size_t part = std::min(left, rest);
      first.written += part;
      moved_[first.header.channel] += part;
      left -= part;
      if (part < rest) break;
      if (first.header.kind == Kind::kData) End(first.ticket);
      outgoing.pop_front();
    }
    if (static_cast<std::size_t>(sent) < wanted) return;
  }
}

void SocketMesh::Lose(Connection& connection, const std::string& why) {
  connection.ended = why;
  epoll_ctl(poller_, EPOLL_CTL_DEL, connection.socket, nullptr);
  DropUnawaited(connection);
}

// Of a connection that has ended: texts, confirmations, and what was cancelled.
void SocketMesh::DropUnawaited(Connection& connection) {
  connection.outgoing.remove_if([](const Outgoing& one) { return one.ticket == kNoTicket; });
  const auto drop = [](auto& queues, const auto& unawaited) {
    for (auto at = queues.begin(); at != queues.end();) {
      auto& queue = at->second;
      queue.erase(std::remove_if(queue.begin(), queue.end(), unawaited), queue.end());
      at = queue.empty() ? queues.erase(at) : std::next(at);
    }
  };
  drop(connection.posted, [](const Posted& posted) { return posted.ticket == kNoTicket; });
  drop(connection.unconfirmed, [](Ticket ticket) { return ticket == kNoTicket; });
}

// A message that is partly read goes to memory of its own, one that is partly written gets a copy.
void SocketMesh::Cancel(Ticket ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Connection& connection : connections_) {
    for (auto& [key, receives] : connection.posted) {
      for (Posted& posted : receives) {
        if (posted.ticket == ticket) posted = {nullptr, posted.bytes, kNoTicket};
      }
    }
    for (auto& [key, messages] : connection.arrived) {
      for (Arrival& arrival : messages) {
        if (arrival.receive && arrival.receive->ticket == ticket)
          arrival.receive = Posted{nullptr, 0, kNoTicket};
      }
    }
    Incoming& in = connection.incoming;
    if (in.matched && in.ticket == ticket && in.arrival == nullptr) {
      in.ticket = kNoTicket;
      in.dropped = std::make_unique<char[]>(in.header.bytes);
      in.target = in.dropped.get();
    }
    bool copied = true;
    for (Outgoing& one : connection.outgoing) {
      if (one.ticket != ticket) continue;
      one.ticket = kNoTicket;
      if (!connection.ended.empty()) continue;
      try {
        one.text = std::make_shared<const std::string>(one.data, one.header.bytes);
        one.data = one.text->data();
      } catch (const std::bad_alloc&) {
        copied = false;
      }
    }
    if (!copied) Lose(connection, "no memory for the rest of a message");
    for (auto& [key, sent] : connection.unconfirmed)
      std::replace(sent.begin(), sent.end(), ticket, kNoTicket);
    if (!connection.ended.empty()) DropUnawaited(connection);
  }
}

void SocketMesh::SendText(std::shared_ptr<const std::string> text, int peer, Channel channel, int kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Connection& connection = At(peer);
  if (!connection.ended.empty()) return;
  Outgoing& last = connection.outgoing.emplace_back();
  last.header = {channel, text->size(), kind, Kind::kData};
  last.data = text->data();
  last.text = std::move(text);
  Write(connection);
}

std::optional<TextMessage> SocketMesh::TakeText(Channel channel, std::optional<int> kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  PollLocked();
  for (int peer = 0; peer < size(); ++peer) {
    if (auto text = TakeTextLocked(peer, channel, kind)) return text;
  }
  return std::nullopt;
}

std::optional<std::string> SocketMesh::TakeTextFrom(int peer, Channel channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  PollLocked();
  auto text = TakeTextLocked(peer, channel, std::nullopt);
  if (text) return std::move(text->text);
  CheckConnected(peer);
  return std::nullopt;
}

std::optional<TextMessage> SocketMesh::TakeTextLocked(int peer, Channel channel, std::optional<int> kind) {
  auto& arrived = At(peer).arrived;
  const auto first = kind ? arrived.find({channel, *kind}) : arrived.lower_bound({channel, 0});
  if (first == arrived.end() || first->first.first != channel || !first->second.front().complete)
    return std::nullopt;
  const int found = first->first.second;
  const Arrival message = TakeFirst(arrived, first);
  return TextMessage{peer, found, std::string(message.data.get(), message.header.bytes)};
}

bool SocketMesh::AllWritten(Channel channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  PollLocked();
  const auto waits = [&](const Outgoing& one) { return one.header.channel == channel; };
  return std::none_of(connections_.begin(), connections_.end(), [&](const Connection& c) {
    return c.ended.empty() && std::any_of(c.outgoing.begin(), c.outgoing.end(), waits);
  });
}

std::uint64_t SocketMesh::Moved(Channel channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return moved_[channel];
}

std::vector<int> SocketMesh::Lost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> ranks;
  for (int peer = 0; peer < size(); ++peer) {
    if (!At(peer).ended.empty()) ranks.push_back(peer);
  }
  return ranks;
}

// A socket that is closed with data to read resets its connection, and the other end may lose what it has not
// read. So each rank says that it ends, and reads until the others have said so.
void SocketMesh::Close(double patience_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double deadline_s = Now() + patience_s;
  const auto open = [](const Connection& c) { return c.socket >= 0 && c.ended.empty(); };
  const auto writes = [&](const Connection& c) { return open(c) && !c.outgoing.empty(); };
  while (std::any_of(connections_.begin(), connections_.end(), writes) && Now() < deadline_s) {
    PollLocked();
    usleep(100);
  }
  for (const Connection& connection : connections_) {
    if (open(connection)) shutdown(connection.socket, SHUT_WR);
  }
  while (std::any_of(connections_.begin(), connections_.end(), open) && Now() < deadline_s) {
    PollLocked();
    usleep(100);
  }
  for (Connection& connection : connections_) {
    if (connection.socket >= 0) close(std::exchange(connection.socket, -1));
    if (connection.ended.empty()) connection.ended = "closed";
  }
}

// Another thread may have held the mutex when the process forked. The child has only this thread.
void SocketMesh::LeaveToParent() {
  for (Connection& connection : connections_) {
    if (connection.socket >= 0) close(std::exchange(connection.socket, -1));
  }
}

SocketTransport::SocketTransport(SocketMesh& mesh, SocketMesh::Channel channel, std::vector<int> ranks,
                                 SocketMesh::CompletesWhen when)
    : mesh_(mesh),
      channel_(channel),
      ranks_(std::move(ranks)),
      rank_(PlaceOf(mesh.rank(), ranks_)),
      completes_when_(when) {}

}  // namespace hvpipe
