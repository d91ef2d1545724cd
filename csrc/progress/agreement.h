// The check that all ranks are about to do the same.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "collectives/control.h"
#include "progress/network.h"
#include "progress/operation.h"

namespace hvpipe {

// Adds the exchange of control records (collectives/control.h) to operations. Records are exchanged in the
// order in which their operations were enqueued. They also carry requests: bits that any rank may set, and
// that all ranks see alike after an exchange.
//
// Threads: any thread may add a stage, set this rank's requests and read those of all. Only the driving
// thread touches the order queue, or a thread inside Progress::WhileNobodyDrives. No lock.
class Agreement {
 public:
  explicit Agreement(Network& network) : network_(network) {}
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // Make a control exchange the first stage of `operation`. `signature` must be equal on all ranks.
  void AddStage(Operation& operation, double samples, std::uint64_t signature, const std::string& shown = "");
  // The exchange of a finished operation that began with AddStage. Throws MismatchError if the signatures
  // differ.
  const ControlExchange& Checked(const Operation& operation);

  // `collective`, and beside it an exchange that checks that all ranks are at `what`, for the operation of
  // this sequence number.
  std::unique_ptr<Collective> MakeBeside(const std::string& what, std::uint64_t sequence,
                                         std::unique_ptr<Collective> collective);
  // An all-reduce whose array travels within such an exchange. Only if GatheredAllReduce::Fits.
  std::unique_ptr<Collective> MakeWithin(const std::string& what, std::uint64_t sequence, const void* in,
                                         void* out, std::size_t count, DType dtype);
  // Make one of these the first stage of `operation`, in turn with other exchanges.
  void AddStage(Operation& operation, Operation::MakeCollective make) {
    operation.AddStage(std::move(make), &order_);
  }

  // Let this rank's records carry these bits from now on.
  void SetRequests(std::uint64_t bits) { own_requests_ = bits; }
  // The bits of all ranks in the last finished exchange, or-ed.
  std::uint64_t requests() const { return requests_; }

  // The next rank, if nothing has come from it in the exchange that `operation` began with AddStage.
  static std::optional<int> Missing(const Operation& operation);

  // The record of the next rank that no exchange of this rank answers: empty if none has arrived, or if this
  // rank has an exchange under way. The next exchange still gets the record.
  std::optional<Record> Unanswered();

 private:
  std::unique_ptr<ControlExchange> MakeExchange(const Record& mine, const void* payload = nullptr);
  static const ControlExchange* ExchangeOf(const Operation& operation);
  void Check(const ControlExchange& exchange);

  Network& network_;
  OrderQueue order_;
  std::atomic<std::uint64_t> own_requests_{0};
  std::atomic<std::uint64_t> requests_{0};
};

}  // namespace hvpipe
