// Adds the exchange of control records to operations.
#include "progress/agreement.h"

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature,
                         const std::string& shown, const Operation::MakeCollective& beside) {
  operation.AddStage(
      [=](const Operation& op) -> std::unique_ptr<Collective> {
        Record record = MakeRecord(signature, op.sequence(), samples, shown.empty() ? op.what : shown);
        record.requests = own_requests_;
        auto exchange = network_.MakeExchange(record);
        if (!beside) return exchange;
        return std::make_unique<CheckedCollective>(std::move(exchange), beside(op));
      },
      &order_);
}

const RecordExchange* Agreement::ExchangeOf(const Operation& operation) {
  const Collective* const first = operation.stages.front().collective.get();
  if (const auto* const both = dynamic_cast<const CheckedCollective*>(first)) return &both->exchange();
  return static_cast<const RecordExchange*>(first);
}

std::optional<int> Agreement::Missing(const Operation& operation) {
  const RecordExchange* const exchange = ExchangeOf(operation);
  return exchange == nullptr ? std::nullopt : exchange->Missing();
}

const Record* Agreement::Unanswered() { return order_.empty() ? network_.EarlyRecord() : nullptr; }

const RecordExchange& Agreement::Checked(const Operation& operation) {
  const RecordExchange& exchange = *ExchangeOf(operation);
  exchange.CheckAgreement();
  requests_ = exchange.requests();
  return exchange;
}

}  // namespace hvpipe
