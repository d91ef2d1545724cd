// Adds the exchange of control records to operations.
#include "core/agreement.h"

#include <memory>

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature) {
  operation.AddStage(
      [=](const Operation& op) { return network_.MakeExchange(MakeRecord(signature, samples, op.what)); },
      &order_);
}

const RecordExchange& Agreement::Checked(const Operation& operation) {
  const auto& exchange = static_cast<const RecordExchange&>(*operation.stages.front().collective);
  exchange.CheckAgreement();
  return exchange;
}

}  // namespace hvpipe
