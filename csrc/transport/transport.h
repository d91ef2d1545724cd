// The network as collectives use it: non-blocking sends and receives between numbered peers.
#pragma once

#include <cstddef>

namespace hvpipe {

// Identifies a send or receive in flight. Valid until Test returns true.
using Ticket = int;
constexpr Ticket kNoTicket = -1;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The rank of a peer in the job, for error messages.
  virtual int RankInJob(int peer) const = 0;

  // A send is done only when the peer has received it, so a sender is never further ahead than its messages
  // in flight; rings over sockets are an exception (SocketTransport). Messages with one tag between two ranks
  // keep their order.
  virtual Ticket Isend(const void* data, std::size_t bytes, int peer, int tag) = 0;
  virtual Ticket Irecv(void* data, std::size_t bytes, int peer, int tag) = 0;

  // Ask once what has completed, for everything in flight. With one call per request MPI would poll its
  // sockets each time, which costs more than all other work.
  virtual void Poll() = 0;

  // True if the request was done at the last Poll. Its ticket is then invalid.
  virtual bool Test(Ticket ticket) = 0;
  // The same for a ticket that may be none, which it becomes once the request is done.
  bool TestAndForget(Ticket& ticket) {
    if (ticket == kNoTicket || !Test(ticket)) return false;
    ticket = kNoTicket;
    return true;
  }

  // True if a message of this peer and tag has arrived and no receive matches it yet.
  virtual bool Probe(int peer, int tag) = 0;

  // The bytes of an array that a rank may have under way to a peer that is not ready for it, and not hold up
  // other messages. The same on all ranks.
  virtual std::size_t most_at_once() const = 0;

  // A message of so many bytes takes about twice the time of an empty one.
  virtual double message_bytes() const = 0;

  // The largest tag; the same on all ranks.
  virtual int most_tag() const = 0;

  // Collective, with nothing under way. The transport cannot be used afterwards.
  virtual void Free() = 0;
};

}  // namespace hvpipe
