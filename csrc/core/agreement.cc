// Adds the exchange of control records to operations.
#include "core/agreement.h"

#include <memory>
#include <utility>

#include "collectives/tags.h"

namespace hvpipe {

void Agreement::AddStage(Operation& operation, double samples, std::uint64_t signature) {
  operation.AddStage(
      [=](const Operation& op) {
        const Record mine = MakeRecord(signature, op.sequence(), samples, op.what);
        return std::make_unique<ControlExchange>(world_, mine, kControlTag,
                                                 std::exchange(early_, std::nullopt));
      },
      &order_);
}

std::optional<int> Agreement::Missing(const Operation& operation) {
  const auto* const exchange = static_cast<const ControlExchange*>(operation.stages.front().collective.get());
  return exchange == nullptr ? std::nullopt : exchange->Missing();
}

// A rank sends its first record to the rank below it, so each rank looks at the rank above.
const Record* Agreement::Unanswered() {
  if (!order_.empty()) return nullptr;
  if (!early_) early_ = TakeRecord(world_, (world_.rank() + 1) % world_.size(), kControlTag);
  return early_ ? &*early_ : nullptr;
}

const ControlExchange& Agreement::Checked(const Operation& operation) {
  const auto& exchange = static_cast<const ControlExchange&>(*operation.stages.front().collective);
  exchange.CheckAgreement();
  return exchange;
}

}  // namespace hvpipe
