// Adds the exchange of control records to operations.
#include "progress/agreement.h"

#include <utility>

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature,
                         const std::string& shown) {
  operation.AddStage(
      [=](const Operation& op) {
        return MakeExchange(MakeRecord(signature, op.sequence(), samples, shown.empty() ? op.what : shown));
      },
      &order_);
}

std::unique_ptr<ControlExchange> Agreement::MakeExchange(const Record& mine, const void* payload) {
  return network_.MakeExchange(mine, own_requests_, payload);
}

std::unique_ptr<Collective> Agreement::MakeBeside(const std::string& what, std::uint64_t sequence,
                                                  std::unique_ptr<Collective> collective) {
  return std::make_unique<CheckedCollective>(
      MakeExchange(MakeRecord(Hash(what), sequence, 0, what)),
      [this](const ControlExchange& exchange) { Check(exchange); }, std::move(collective));
}

std::unique_ptr<Collective> Agreement::MakeWithin(const std::string& what, std::uint64_t sequence,
                                                  const void* in, void* out, std::size_t count, DType dtype) {
  Record record = MakeRecord(Hash(what), sequence, 0, what);
  record.payload_bytes = static_cast<std::uint32_t>(count * SizeOf(dtype));
  return std::make_unique<GatheredAllReduce>(
      MakeExchange(record, in), [this](const ControlExchange& exchange) { Check(exchange); }, out, count,
      dtype);
}

const ControlExchange* Agreement::ExchangeOf(const Operation& operation) {
  return static_cast<const ControlExchange*>(operation.stages.front().collective.get());
}

std::optional<int> Agreement::Missing(const Operation& operation) {
  const ControlExchange* const exchange = ExchangeOf(operation);
  return exchange == nullptr ? std::nullopt : exchange->Missing();
}

std::optional<Record> Agreement::Unanswered() {
  return order_.empty() ? network_.EarlyRecord() : std::nullopt;
}

const ControlExchange& Agreement::Checked(const Operation& operation) {
  const ControlExchange& exchange = *ExchangeOf(operation);
  Check(exchange);
  return exchange;
}

void Agreement::Check(const ControlExchange& exchange) {
  exchange.CheckAgreement();
  requests_ = exchange.requests();
}

}  // namespace hvpipe
