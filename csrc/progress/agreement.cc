// Adds the exchange of control records to operations.
#include "progress/agreement.h"

#include <utility>

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature,
                         const std::string& shown) {
  operation.AddStage(
      [=](const Operation& op) {
        Record record = MakeRecord(signature, op.sequence(), samples, shown.empty() ? op.what : shown);
        record.requests = own_requests_;
        return network_.MakeExchange(record);
      },
      &order_);
}

Record Agreement::RecordOf(const std::string& what, std::uint64_t sequence) const {
  Record record = MakeRecord(Hash(what), sequence, 0, what);
  record.requests = own_requests_;
  return record;
}

std::unique_ptr<Collective> Agreement::MakeBeside(const std::string& what, std::uint64_t sequence,
                                                  std::unique_ptr<Collective> collective) {
  return std::make_unique<CheckedCollective>(
      network_.MakeExchange(RecordOf(what, sequence)),
      [this](const RecordExchange& exchange) { Check(exchange); }, std::move(collective));
}

std::unique_ptr<Collective> Agreement::MakeWithin(const std::string& what, std::uint64_t sequence,
                                                  const void* in, void* out, std::size_t count, DType dtype) {
  Record record = RecordOf(what, sequence);
  record.payload_bytes = static_cast<std::uint32_t>(count * SizeOf(dtype));
  return std::make_unique<GatheredAllReduce>(
      network_.MakeExchange(record, in), [this](const RecordExchange& exchange) { Check(exchange); }, out,
      count, dtype);
}

const RecordExchange* Agreement::ExchangeOf(const Operation& operation) {
  return static_cast<const RecordExchange*>(operation.stages.front().collective.get());
}

std::optional<int> Agreement::Missing(const Operation& operation) {
  const RecordExchange* const exchange = ExchangeOf(operation);
  return exchange == nullptr ? std::nullopt : exchange->Missing();
}

const Record* Agreement::Unanswered() { return order_.empty() ? network_.EarlyRecord() : nullptr; }

const RecordExchange& Agreement::Checked(const Operation& operation) {
  const RecordExchange& exchange = *ExchangeOf(operation);
  Check(exchange);
  return exchange;
}

void Agreement::Check(const RecordExchange& exchange) {
  exchange.CheckAgreement();
  requests_ = exchange.requests();
}

}  // namespace hvpipe
