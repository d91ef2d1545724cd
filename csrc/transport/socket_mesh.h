// Messages between all ranks over TCP connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/socket_setup.h"
#include "transport/text_messages.h"
#include "transport/transport.h"

namespace hvpipe {

// One connection for each pair of ranks. A message has a header with its channel and its tag, and goes to the
// oldest receive of the same ones. A large message without one is left in the kernel until the next call of
// Poll: then the receive is usually there, and saves a copy.
//
// Threads: any thread may call; mutex_ guards everything.
class SocketMesh {
 public:
  // Messages of other channels never match.
  using Channel = std::uint64_t;
  // When a send is done: the kernel has the data, or the receiver has.
  enum class CompletesWhen { kSent, kReceived };

  explicit SocketMesh(const Sockets& sockets);
  ~SocketMesh();
  SocketMesh(const SocketMesh&) = delete;
  SocketMesh& operator=(const SocketMesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(connections_.size()); }
  const std::vector<ProcessName>& processes() const { return processes_; }
  // The first of 2^32 channels that nobody else has. Collective, in the same order on all ranks.
  Channel NewChannels();

  // See Transport.
  Ticket Send(const void* data, std::size_t bytes, int peer, Channel channel, int tag, CompletesWhen when);
  Ticket Receive(void* data, std::size_t bytes, int peer, Channel channel, int tag);
  bool Test(Ticket ticket);
  bool Probe(int peer, Channel channel, int tag);
  // Throws if a rank has gone that something waits for.
  void Poll();

  // The data of a send or receive that is under way may be freed from now on.
  void Cancel(Ticket ticket);

  // A text goes out as soon as possible. A rank that has gone never gets it.
  void SendText(std::shared_ptr<const std::string> text, int peer, Channel channel, int kind);
  // A text that has arrived in this channel, of this kind if one is given. Polls, but throws nothing.
  std::optional<TextMessage> TakeText(Channel channel, std::optional<int> kind = std::nullopt);
  // The same from one peer. Throws if none is there and the peer has gone.
  std::optional<std::string> TakeTextFrom(int peer, Channel channel);
  // Whether the kernel has everything that was to be sent in this channel.
  bool AllWritten(Channel channel);
  // Bytes that were sent and received in this channel so far.
  std::uint64_t Moved(Channel channel);
  // The ranks whose connection has ended.
  std::vector<int> Lost();

  // Collective, with nothing under way: close all connections, once the others do so or after `patience_s`.
  void Close(double patience_s);
  // In a child of fork: close its copies of the connections. Nothing can be called afterwards.
  void LeaveToParent();

 private:
  using Key = std::pair<Channel, int>;
  enum class Kind : std::uint32_t { kData, kDataToConfirm, kConfirmation };
  struct Header {
    Channel channel = 0;
    std::uint64_t bytes = 0;
    std::int32_t tag = 0;
    Kind kind = Kind::kData;
  };
  static_assert(sizeof(Header) == 24);

  struct Outgoing {
    Header header;
    const char* data = nullptr;
    Ticket ticket = kNoTicket;
    std::size_t written = 0;                       // of the header and the data
    std::shared_ptr<const std::string> text = {};  // what `data` points to, for a text
  };
  struct Posted {
    char* data;
    std::size_t bytes;
    Ticket ticket;
  };
  // A message that came before its receive.
  struct Arrival {
    std::unique_ptr<char[]> data;
    Header header;
    bool complete = false;
    std::optional<Posted> receive = {};  // that came while the message was arriving
  };
  // The message that is being read.
  struct Incoming {
    Header header, next;
    std::size_t header_bytes = 0;  // read
    std::size_t bytes = 0;         // of the data, read
    bool matched = false;
    bool left_once = false;  // in the kernel
    char* target = nullptr;
    Ticket ticket = kNoTicket;
    Arrival* arrival = nullptr;
    std::unique_ptr<char[]> dropped = {};  // data of a receive that was cancelled
  };
  struct Connection {
    int socket = -1;
    std::string ended;             // why; empty: it has not
    std::list<Outgoing> outgoing;  // whose elements stay where they are, because `data` may point into one
    Incoming incoming;
    std::map<Key, std::deque<Posted>> posted;
    std::map<Key, std::list<Arrival>> arrived;
    std::map<Key, std::deque<Ticket>> unconfirmed;
  };

  Ticket NewTicket();
  Connection& At(int peer) { return connections_[static_cast<std::size_t>(peer)]; }
  void CheckConnected(int peer);
  void CloseSockets();
  // Why a message is not what the receive wants; "": it is.
  static std::string Misfit(const Header& header, const Posted& receive, int peer);
  // With mutex_ held.
  void PollLocked();
  void Read(Connection& connection);
  bool Match(Connection& connection);
  void FinishMessage(Connection& connection);
  void Deliver(Connection& connection, const Arrival& message, const Posted& receive);
  void Deliver(Connection& connection, const Header& header, Ticket ticket);
  void Write(Connection& connection);
  void End(Ticket ticket);
  void Lose(Connection& connection, const std::string& why);
  static void DropUnawaited(Connection& connection);
  std::optional<TextMessage> TakeTextLocked(int peer, Channel channel, std::optional<int> kind);

  std::mutex mutex_;
  const int rank_;
  const std::vector<ProcessName> processes_;  // by rank
  int poller_ = -1;                           // epoll
  std::vector<Connection> connections_;       // by rank; that to itself has no socket
  Channel next_channel_ = Channel{1} << 32;
  std::vector<char> done_;  // by ticket
  std::vector<Ticket> free_;
  std::map<Ticket, std::string> misfits_;
  std::map<Channel, std::uint64_t> moved_;
};

// A channel of a mesh, between all ranks or some of them.
//
// Threads: as Transport.
class SocketTransport : public Transport {
 public:
  // `ranks` ascend and include this rank.
  SocketTransport(SocketMesh& mesh, SocketMesh::Channel channel, std::vector<int> ranks,
                  SocketMesh::CompletesWhen when);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  int RankInJob(int peer) const override { return ranks_[static_cast<std::size_t>(peer)]; }
  Ticket Isend(const void* data, std::size_t bytes, int peer, int tag) override {
    return mesh_.Send(data, bytes, RankInJob(peer), channel_, tag, completes_when_);
  }
  Ticket Irecv(void* data, std::size_t bytes, int peer, int tag) override {
    return mesh_.Receive(data, bytes, RankInJob(peer), channel_, tag);
  }
  std::size_t most_at_once() const override { return 240'000; }
  double message_bytes() const override { return 12e3; }  // 6 KB at 1 Gb/s, 33 KB at 10 Gb/s
  int most_tag() const override { return std::numeric_limits<std::int32_t>::max(); }
  void Poll() override { mesh_.Poll(); }
  bool Test(Ticket ticket) override { return mesh_.Test(ticket); }
  bool Probe(int peer, int tag) override { return mesh_.Probe(RankInJob(peer), channel_, tag); }
  void Free() override {}

 private:
  SocketMesh& mesh_;
  const SocketMesh::Channel channel_;
  const std::vector<int> ranks_;
  const int rank_;
  const SocketMesh::CompletesWhen completes_when_;
};

class SocketTextMessages : public TextMessages {
 public:
  SocketTextMessages(SocketMesh& mesh, SocketMesh::Channel channel)
      : TextMessages(mesh.rank(), mesh.processes()), mesh_(mesh), channel_(channel) {}

  void Send(int rank, int kind, const std::string& text) override {
    mesh_.SendText(std::make_shared<const std::string>(text), rank, channel_, kind);
  }
  std::optional<TextMessage> Receive() override { return mesh_.TakeText(channel_); }
  void Free() override {}

 private:
  SocketMesh& mesh_;
  const SocketMesh::Channel channel_;
};

}  // namespace hvpipe
