// Adds the exchange of control records to operations.
#include "core/agreement.h"

#include <memory>

#include "collectives/tags.h"

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature) {
  operation.AddStage(
      [=](const Operation& op) {
        Record record = MakeRecord(signature, samples, op.what);
        record.requests = own_requests_;
        return std::make_unique<ControlExchange>(world_, record, kControlTag);
      },
      &order_);
}

const ControlExchange& Agreement::Checked(const Operation& operation) {
  const auto& exchange = static_cast<const ControlExchange&>(*operation.stages.front().collective);
  exchange.CheckAgreement();
  requests_ = exchange.requests();
  return exchange;
}

}  // namespace hvpipe
