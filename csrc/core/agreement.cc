// Adds the exchange of control records to operations.
#include "core/agreement.h"

#include <memory>

#include "collectives/tags.h"

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature) {
  operation.AddStage(
      [=](const Operation& op) {
        return std::make_unique<ControlExchange>(world_, MakeRecord(signature, samples, op.what),
                                                 kControlTag);
      },
      &order_);
}

const ControlExchange& Agreement::Checked(const Operation& operation) {
  const auto& exchange = static_cast<const ControlExchange&>(*operation.stages.front().collective);
  exchange.CheckAgreement();
  return exchange;
}

}  // namespace hvpipe
