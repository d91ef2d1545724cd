// The engine's blocking collectives: checked to be the same call on all ranks, driven by the caller.
#include <cstring>
#include <utility>

#include "core/engine.h"
#include "collectives/gather.h"
#include "collectives/tags.h"

namespace hvpipe {

std::shared_ptr<Operation> Engine::Blocking(const std::string& what) {
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->priority = kBlockingPriority;
  return operation;
}

int Engine::NextTag() { return kFirstCallTag + blocking_calls_++ % kCallTags; }

// A blocking call across hosts first makes sure that every rank is at the same call. On one host the
// all-reduce checks that by itself, in the slots of the lane.
std::shared_ptr<Operation> Engine::Checked(const std::string& what) {
  auto operation = Blocking(what);
  AddControlStage(*operation, 0, Hash(what));
  operation->check = [](Operation& done) {
    static_cast<const ControlExchange&>(*done.stages.front().collective).CheckAgreement();
  };
  return operation;
}

void Engine::RunChecked(const std::string& what,
                        std::function<std::unique_ptr<Collective>(const Operation&)> make,
                        const Interrupt& interrupt) {
  progress_->Run(Checked(what), interrupt);
  auto operation = Blocking(what);
  operation->stages.push_back({std::move(make), nullptr, nullptr});
  progress_->Run(operation, interrupt);
}

void Engine::AllReduce(const void* in, void* out, std::size_t count, DType dtype, double scale,
                       const std::string& what, const Interrupt& interrupt) {
  if (size_ == 1) {
    PackScaled(in, dtype, out, dtype, count, scale);
    return;
  }
  if (hosts_ > 1 || !up_) progress_->Run(Checked(what), interrupt);
  if (dtype == DType::kFloat16 && scale != 1.0) {  // its sum may be more than the type holds
    PackScaled(in, dtype, out, dtype, count, scale);
    in = out;
    scale = 1.0;
  }
  const Ends ends{in, out, count};
  const int tag = NextTag();
  const auto queued = [&] {
    auto operation = Blocking(what);
    operation->traced = "reduce";
    AddReduceStages(*operation, std::make_shared<const Ends>(ends), dtype, scale, tag);
    return operation;
  };
  if (!up_ || hosts_ > 1) return progress_->Run(queued(), interrupt);
  // Within a host nothing but shared memory says where the peers are; one that does something else would be
  // waited for until the deadline.
  constexpr double kPatienceS = 1.0;
  double first_look_s = 0;
  const auto looked_after = [&] {
    interrupt();
    if (first_look_s == 0) first_look_s = Now();
    if (Now() - first_look_s > kPatienceS) CheckPeersAreHere(what);
  };
  if (count * SizeOf(dtype) > up_->slot_bytes()) return progress_->Run(queued(), std::ref(looked_after));
  const auto make = [&](std::uint64_t sequence) {
    return LaneSum(what, sequence, ends, dtype, scale, LaneReduce::Result::kAll);
  };
  progress_->RunBrief(std::ref(make), std::ref(queued), std::ref(looked_after));
}

// A peer that has not come to the lane but has sent a control record is at another call. Its first record
// goes to the rank below it, so each looks at the rank above.
void Engine::CheckPeersAreHere(const std::string& what) {
  const int above = (rank_ + 1) % size_;
  const auto& theirs = up_->written(above);
  if (theirs.load(std::memory_order_acquire) >= up_->written(rank_).load(std::memory_order_relaxed)) return;
  std::optional<Record> record;
  progress_->Alone([&] { record = TakeRecord(*world_, above, kControlTag); });
  if (!record) return;
  throw Disagreement("Rank", rank_, what, above, record->what.data());
}

void Engine::Broadcast(void* data, std::size_t bytes, int root, const std::string& what,
                       const Interrupt& interrupt) {
  if (size_ == 1) return;
  const int tag = NextTag();
  RunChecked(
      what,
      [=](const Operation&) -> std::unique_ptr<Collective> {
        return std::make_unique<ChainBroadcast>(*world_, counters_, data, bytes, root, options_.segment_bytes,
                                                tag);
      },
      interrupt);
}

void Engine::AllGather(const void* in, void* out, std::size_t bytes, const std::string& what,
                       const Interrupt& interrupt) {
  char* mine = static_cast<char*>(out) + static_cast<std::size_t>(rank_) * bytes;
  if (in != mine) std::memcpy(mine, in, bytes);
  if (size_ == 1) return;
  const int tag = NextTag();
  RunChecked(
      what,
      [=](const Operation&) -> std::unique_ptr<Collective> {
        return std::make_unique<RingAllGather>(*world_, counters_, out, bytes, options_.segment_bytes, tag);
      },
      interrupt);
}

std::vector<double> Engine::Agree(const std::string& what, double samples, const Interrupt& interrupt,
                                  bool patient) {
  if (size_ == 1) return {samples};
  auto operation = std::make_shared<Operation>();
  operation->what = what;
  operation->priority = kControlPriority;
  operation->patient = patient;
  AddControlStage(*operation, samples, Hash(what));
  std::vector<double> all;
  operation->check = [this, &all](Operation& done) {
    const auto& exchange = static_cast<const ControlExchange&>(*done.stages.front().collective);
    exchange.CheckAgreement();
    for (int rank = 0; rank < size_; ++rank) all.push_back(exchange.of(rank).samples);
  };
  progress_->Run(operation, interrupt);
  return all;
}

}  // namespace hvpipe
