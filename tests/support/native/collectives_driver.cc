// Runs collectives of many ranks in one process, over a transport in memory, in an order that a seed decides.
//
//   collectives_driver < cases         each line: ALGORITHM RANKS COUNT SEGMENT_BYTES IN_PLACE SEED
//
// Prints a line for each case: "ok MESSAGES BYTES", the most that a rank has sent, or what is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/butterfly.h"
#include "collectives/control.h"
#include "collectives/gather.h"
#include "collectives/ring.h"

namespace {

using hvpipe::Ticket;

// What is under way between the ranks. A message is delivered when its receive is posted, and then after a
// random number of polls: of the receiver, and again of the sender.
class Wires {
 public:
  explicit Wires(unsigned seed) : random_(seed) {}

  struct Message {
    const void* data = nullptr;
    std::size_t bytes = 0;
    void* to = nullptr;
    std::size_t room = 0;
    int delay = -1;  // polls of the receiver until it arrives; -1: no receive matches it yet
    bool received = false;
  };
  using Key = std::tuple<int, int, int>;  // from, to, tag
  struct Way {
    std::deque<std::shared_ptr<Message>> sent, wanted;
  };

  std::shared_ptr<Message> Send(const Key& key, const void* data, std::size_t bytes) {
    Way& way = ways_[key];
    const auto message = Next(way.wanted, way.sent);
    message->data = data;
    message->bytes = bytes;
    return message;
  }
  std::shared_ptr<Message> Receive(const Key& key, void* to, std::size_t room) {
    Way& way = ways_[key];
    const auto message = Next(way.sent, way.wanted);
    message->to = to;
    message->room = room;
    return message;
  }
  bool Waits(const Key& key) { return !ways_[key].sent.empty(); }
  bool Later(Message& message) {
    if (message.delay > 0) --message.delay;
    return message.delay != 0;
  }
  unsigned Pick(unsigned below) { return static_cast<unsigned>(random_() % below); }

 private:
  std::shared_ptr<Message> Next(std::deque<std::shared_ptr<Message>>& waiting,
                                std::deque<std::shared_ptr<Message>>& mine) {
    if (!waiting.empty()) {
      auto found = waiting.front();
      waiting.pop_front();
      found->delay = static_cast<int>(Pick(4));
      return found;
    }
    return mine.emplace_back(std::make_shared<Message>());
  }

  std::mt19937 random_;
  std::map<Key, Way> ways_;
};

class MemoryTransport : public hvpipe::Transport {
 public:
  MemoryTransport(Wires& wires, int rank, int size) : wires_(wires), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int RankInJob(int peer) const override { return peer; }
  Ticket Isend(const void* data, std::size_t bytes, int peer, int tag) override {
    ++sent;
    sent_bytes += bytes;
    flights_.push_back({wires_.Send({rank_, peer, tag}, data, bytes), true});
    return static_cast<Ticket>(flights_.size() - 1);
  }
  Ticket Irecv(void* data, std::size_t bytes, int peer, int tag) override {
    flights_.push_back({wires_.Receive({peer, rank_, tag}, data, bytes), false});
    return static_cast<Ticket>(flights_.size() - 1);
  }
  void Poll() override {
    for (auto& [message, sends] : flights_) {
      if (!message || sends || message->received || message->delay < 0 || wires_.Later(*message)) continue;
      if (message->bytes > message->room) throw std::runtime_error("a message is longer than its receive");
      if (message->bytes > 0) std::memcpy(message->to, message->data, message->bytes);
      message->received = true;
    }
  }
  bool Test(Ticket ticket) override {
    auto& message = flights_[static_cast<std::size_t>(ticket)].first;
    if (!message->received) return false;
    message.reset();
    return true;
  }
  bool Probe(int peer, int tag) override { return wires_.Waits({peer, rank_, tag}); }
  std::size_t most_at_once() const override { return 240'000; }
  double message_bytes() const override { return 20e3; }
  int most_tag() const override { return 1 << 20; }
  void Free() override {}

  long sent = 0;
  std::size_t sent_bytes = 0;

 private:
  Wires& wires_;
  const int rank_, size_;
  std::vector<std::pair<std::shared_ptr<Wires::Message>, bool>> flights_;
};

struct Case {
  std::string algorithm;
  int ranks = 0;
  std::size_t count = 0, segment_bytes = 0;
  bool in_place = false;
  unsigned seed = 0;
};

float Element(int rank, std::size_t i) {
  return 1.0F + static_cast<float>((static_cast<unsigned>(rank) * 7919U + i * 104729U) % 1000U) / 997.0F;
}

// In an agreement each rank is at one of `count` calls, which have payloads of different sizes.
std::string CallOf(const Case& given, int rank) {
  std::mt19937 random(given.seed + static_cast<unsigned>(rank));
  const auto call = random() % std::max<std::size_t>(given.count, 1);
  return call == 3 ? hvpipe::kLeaving : "call " + std::to_string(call);
}

hvpipe::Record RecordOf(const Case& given, int rank) {
  const std::string call = CallOf(given, rank);
  hvpipe::Record record = hvpipe::MakeRecord(hvpipe::Hash(call), 7, rank, call);
  record.rank = rank;
  const std::size_t most = hvpipe::ControlExchange::kMostPayloadBytes / static_cast<std::size_t>(given.ranks);
  if (given.count > 0) record.payload_bytes = static_cast<std::uint32_t>(record.signature % most);
  return record;
}

// The text of the error that a rank should get; empty: it should get none.
std::string WantedError(const Case& given, int rank) {
  const std::string mine = CallOf(given, rank);
  for (const bool leaving : {true, false}) {
    for (int other = 0; other < given.ranks; ++other) {
      const std::string theirs = CallOf(given, other);
      if (theirs != mine && (theirs == hvpipe::kLeaving) == leaving)
        return hvpipe::DifferentCalls(rank, mine, RecordOf(given, other)).what();
    }
  }
  return "";
}

std::string CheckAgreement(const Case& given, const hvpipe::ControlExchange& exchange, int rank,
                           const std::vector<std::vector<float>>& payloads) {
  std::string error;
  try {
    exchange.CheckAgreement();
  } catch (const hvpipe::Error& found) {
    error = found.what();
  }
  const std::string wanted = WantedError(given, rank);
  if (error != wanted) return "rank " + std::to_string(rank) + " says: " + error + " and not: " + wanted;
  if (exchange.requests() != ~std::uint64_t{0} >> (64 - given.ranks)) return "requests are wrong";
  for (int other = 0; other < given.ranks && wanted.empty(); ++other) {
    if (exchange.SamplesOf(other) != other) return "a number of samples is wrong";
    const float* const sent = payloads[static_cast<std::size_t>(other)].data();
    if (std::memcmp(exchange.PayloadOf(other), sent, RecordOf(given, other).payload_bytes) != 0)
      return "a payload is wrong";
  }
  return "";
}

int RootOf(const Case& given) { return static_cast<int>(given.seed % static_cast<unsigned>(given.ranks)); }

std::unique_ptr<hvpipe::Collective> Make(const Case& given, hvpipe::Transport& transport,
                                         hvpipe::SendBudget& budget, hvpipe::Counters& counters,
                                         const void* in, void* out) {
  if (given.algorithm == "agreement") {
    std::vector<char> from_above;
    const int above = (transport.rank() + 1) % given.ranks;
    if (given.in_place) from_above = hvpipe::ControlExchange::TakeMessage(transport, above, 0);
    if (!from_above.empty() && hvpipe::ControlExchange::RecordIn(from_above).rank != above)
      throw std::runtime_error("a first message has another record than its sender's");
    return std::make_unique<hvpipe::ControlExchange>(transport, counters, RecordOf(given, transport.rank()),
                                                     std::uint64_t{1} << transport.rank(), in, 0, from_above);
  }
  if (given.algorithm == "gathered") {
    hvpipe::Record record = hvpipe::MakeRecord(hvpipe::Hash("call"), 7, 0, "call");
    record.payload_bytes = static_cast<std::uint32_t>(given.count * sizeof(float));
    return std::make_unique<hvpipe::GatheredAllReduce>(
        std::make_unique<hvpipe::ControlExchange>(transport, counters, record, 0, in, 0, std::vector<char>{}),
        [](const hvpipe::ControlExchange& exchange) { exchange.CheckAgreement(); }, out, given.count,
        hvpipe::DType::kFloat32);
  }
  if (given.algorithm == "broadcast") {
    const hvpipe::MessageOptions message{0, 0, given.segment_bytes, 8};
    return std::make_unique<hvpipe::Broadcast>(transport, counters, out, given.count * sizeof(float),
                                               RootOf(given), message);
  }
  if (hvpipe::ParseAlgorithm(given.algorithm) == hvpipe::Algorithm::kRing) {
    hvpipe::RingAllReduce::Options ring;
    ring.segment_bytes = given.segment_bytes;
    return std::make_unique<hvpipe::RingAllReduce>(transport, budget, counters, in, out, given.count,
                                                   hvpipe::DType::kFloat32, ring);
  }
  auto steps = hvpipe::ParseAlgorithm(given.algorithm) == hvpipe::Algorithm::kDoubling
                   ? hvpipe::DoublingSteps(transport.rank(), given.ranks, given.count)
                   : hvpipe::HalvingSteps(transport.rank(), given.ranks, given.count);
  return std::make_unique<hvpipe::ButterflyAllReduce>(
      transport, budget, counters, in, out, given.count, hvpipe::DType::kFloat32, std::move(steps),
      hvpipe::ButterflyAllReduce::Options{given.segment_bytes, 3, 0});
}

std::string Run(const Case& given) {
  Wires wires(given.seed);
  std::vector<std::unique_ptr<MemoryTransport>> transports;
  std::vector<std::unique_ptr<hvpipe::SendBudget>> budgets;
  std::vector<hvpipe::Counters> counters(static_cast<std::size_t>(given.ranks));
  std::vector<std::vector<float>> ins, outs;
  std::vector<std::unique_ptr<hvpipe::Collective>> collectives;
  for (int rank = 0; rank < given.ranks; ++rank) {
    transports.push_back(std::make_unique<MemoryTransport>(wires, rank, given.ranks));
    budgets.push_back(std::make_unique<hvpipe::SendBudget>(8));
    // An agreement's payload is not `count` elements long.
    auto& in = ins.emplace_back(given.algorithm == "agreement" ? 30'000 : given.count);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = Element(rank, i);
    outs.push_back(given.algorithm == "broadcast" ? in : std::vector<float>(given.count, -1.0F));
  }
  collectives.resize(ins.size());
  for (std::size_t at = ins.size(); at-- > 0;) {
    collectives[at] = Make(given, *transports[at], *budgets[at], counters[at], ins[at].data(),
                           given.in_place ? ins[at].data() : outs[at].data());
    if (given.algorithm == "agreement") (void)collectives[at]->Step();  // so that its message arrives early
  }
  auto done = static_cast<std::size_t>(
      std::count_if(collectives.begin(), collectives.end(), [](const auto& one) { return one->done(); }));
  for (long turn = 0; done < collectives.size(); ++turn) {
    if (turn > 4'000'000) return "it does not end: rank 0 waits for " + collectives[0]->Waiting();
    const std::size_t at = wires.Pick(static_cast<unsigned>(given.ranks));
    if (collectives[at]->done()) continue;
    budgets[at]->BeginPass(0);
    transports[at]->Poll();
    (void)collectives[at]->Step();
    if (collectives[at]->done()) ++done;
  }
  long most = 0;
  std::size_t most_bytes = 0;
  for (const auto& transport : transports) {
    most = std::max(most, transport->sent);
    most_bytes = std::max(most_bytes, transport->sent_bytes);
  }
  const std::string ok = "ok " + std::to_string(most) + " " + std::to_string(most_bytes);
  if (given.algorithm == "agreement") {
    for (std::size_t at = 0; at < ins.size(); ++at) {
      const auto& exchange = static_cast<const hvpipe::ControlExchange&>(*collectives[at]);
      const std::string wrong = CheckAgreement(given, exchange, static_cast<int>(at), ins);
      if (!wrong.empty()) return wrong;
    }
    return ok;
  }
  const auto& sums = given.in_place ? ins : outs;
  for (std::size_t i = 0; i < given.count; ++i) {
    double wanted = 0;
    for (int rank = 0; rank < given.ranks; ++rank) {
      if (given.algorithm != "broadcast" || rank == RootOf(given)) wanted += Element(rank, i);
    }
    if (std::abs(sums[0][i] - wanted) > 1e-6 * given.ranks * wanted) return "a sum is wrong";
  }
  for (std::size_t at = 1; at < sums.size(); ++at) {
    if (given.count > 0 && std::memcmp(sums[at].data(), sums[0].data(), given.count * sizeof(float)) != 0)
      return "ranks end with different bits";
  }
  return ok;
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream fields(line);
    Case given;
    int in_place = 0;
    fields >> given.algorithm >> given.ranks >> given.count >> given.segment_bytes >> in_place >> given.seed;
    given.in_place = in_place != 0;
    std::printf("%s\n", Run(given).c_str());
  }
}
