// What a collective needs of a network: non-blocking sends and receives between numbered peers.
#pragma once

#include <cstddef>

namespace hvpipe {

// Names a send or receive in flight; valid until Test says that it is done.
using Ticket = int;
constexpr Ticket kNoTicket = -1;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The rank in the whole job of one of these peers, as messages for people name it.
  virtual int RankInJob(int peer) const = 0;

  // The send is done only when the peer has taken the message, so a sender cannot run ahead of its
  // receiver by more than what it has in flight. Messages with one tag between two ranks keep their order.
  virtual Ticket Isend(const void* data, std::size_t bytes, int peer, int tag) = 0;
  virtual Ticket Irecv(void* data, std::size_t bytes, int peer, int tag) = 0;

  // Looks once at everything in flight. Asking for each operation by itself would let MPI poll its sockets
  // as many times, which costs more than all the rest.
  virtual void Poll() = 0;

  // True if the operation was done at the last Poll; its ticket is then spent.
  virtual bool Test(Ticket ticket) = 0;

  // True if a message of this peer and tag has come that no receive has taken.
  virtual bool Probe(int peer, int tag) = 0;
};

}  // namespace hvpipe
