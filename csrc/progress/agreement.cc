// Adds the exchange of control records to operations.
#include "progress/agreement.h"

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

std::optional<int> Agreement::Missing(const Operation& operation) {
  const auto* const exchange = static_cast<const RecordExchange*>(operation.stages.front().collective.get());
  return exchange == nullptr ? std::nullopt : exchange->Missing();
}

const Record* Agreement::Unanswered() { return order_.empty() ? network_.EarlyRecord() : nullptr; }

const RecordExchange& Agreement::Checked(const Operation& operation) {
  const auto& exchange = static_cast<const RecordExchange&>(*operation.stages.front().collective);
  exchange.CheckAgreement();
  requests_ = exchange.requests();
  return exchange;
}

}  // namespace hvpipe
