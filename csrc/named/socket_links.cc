// Collectives of messages between each two ranks, in as few rounds as possible.
#include "named/socket_links.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/event_log.h"
#include "named/numbers.h"

namespace hvpipe::named {
namespace {

constexpr double kShortestNapS = 5e-6, kLongestNapS = 200e-6;
constexpr int kTag = 1;
constexpr double kLeastBytesPerS = 1e6;  // of the slowest network, as in NamedCalls::InMpi

// The sends and receives of one collective. An error cancels those that are under way, because their memory
// belongs to the caller.
class Transfers {
 public:
  Transfers(SocketMesh& mesh, SocketMesh::Channel channel, const std::vector<int>& ranks, double limit_s,
            double more_s = 0)
      : mesh_(mesh), channel_(channel), ranks_(ranks), limit_s_(limit_s), more_s_(more_s) {}
  ~Transfers() {
    for (const auto& [ticket, place] : under_way_) {
      if (ticket != kNoTicket) mesh_.Cancel(ticket);
    }
  }
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  void Send(const void* data, std::size_t bytes, int place) {
    under_way_.push_back(
        {mesh_.Send(data, bytes, RankAt(place), channel_, kTag, SocketMesh::CompletesWhen::kSent), place});
  }
  void Receive(void* data, std::size_t bytes, int place) {
    under_way_.push_back({mesh_.Receive(data, bytes, RankAt(place), channel_, kTag), place});
  }

  void Wait() {
    double moved_s = Now(), nap_s = kShortestNapS;
    std::uint64_t moved = 0;
    for (;;) {
      mesh_.Poll();
      const std::size_t before = under_way_.size();
      for (auto& [ticket, place] : under_way_) {
        const Ticket tested = std::exchange(ticket, kNoTicket);  // first: a test that throws has ended it
        if (!mesh_.Test(tested)) ticket = tested;
      }
      under_way_.erase(std::remove_if(under_way_.begin(), under_way_.end(),
                                      [](const auto& each) { return each.first == kNoTicket; }),
                       under_way_.end());
      if (under_way_.empty()) return;
      const std::uint64_t now_moved = mesh_.Moved(channel_);
      if (under_way_.size() < before || now_moved != moved) {
        moved = now_moved;
        moved_s = Now();
        nap_s = kShortestNapS;
      }
      if (Now() - moved_s > limit_s_ + more_s_) {
        throw Error("Rank " + std::to_string(RankAt(under_way_.front().second)) +
                        " should send or take its part of a collective within " +
                        std::to_string(std::lround(limit_s_)) + " s (HVPIPE_TIMEOUT). Received: nothing",
                    ErrorKind::kDeadline);
      }
      std::this_thread::sleep_for(std::chrono::duration<double>(nap_s));
      nap_s = std::min(nap_s * 1.5, kLongestNapS);
    }
  }

 private:
  int RankAt(int place) const { return ranks_[static_cast<std::size_t>(place)]; }

  SocketMesh& mesh_;
  const SocketMesh::Channel channel_;
  const std::vector<int>& ranks_;
  const double limit_s_, more_s_;                  // more_s_: for ranks between that pass the data on
  std::vector<std::pair<Ticket, int>> under_way_;  // with the place of the other end
};

class SocketSetLinks : public SetLinks {
 public:
  SocketSetLinks(std::shared_ptr<SocketMesh> mesh, SocketMesh::Channel channel, std::vector<int> ranks,
                 double limit_s)
      : mesh_(std::move(mesh)), channel_(channel), ranks_(std::move(ranks)), limit_s_(limit_s) {
    place_ = static_cast<int>(std::lower_bound(ranks_.begin(), ranks_.end(), mesh_->rank()) - ranks_.begin());
  }

  // Every rank adds in the order of places, so all get the same bits.
  void AllReduce(void* data, std::int64_t count, Type type, ReduceOp op) override {
    const std::size_t bytes = static_cast<std::size_t>(count) * SizeOf(type);
    if (bytes <= kOneRoundBytes) {
      const std::vector<std::size_t> each(ranks_.size(), bytes);
      std::vector<char> all(bytes * ranks_.size());
      Gather(data, all.data(), each);
      for (int place = 0; place < size(); ++place)
        Add(data, all.data() + static_cast<std::size_t>(place) * bytes, count, type, op, place);
      return;
    }
    const std::vector<std::int64_t> counts = Shares(count, size());
    std::vector<std::size_t> parts;
    for (const std::int64_t each : counts) parts.push_back(static_cast<std::size_t>(each) * SizeOf(type));
    std::vector<char> mine(parts[At(place_)]);
    ReduceScatter(data, mine.data(), counts, type, op);
    Gather(mine.data(), data, parts);
  }

  void ReduceScatter(const void* in, void* out, const std::vector<std::int64_t>& counts, Type type,
                     ReduceOp op) override {
    Transfers transfers = Begin();
    const std::size_t element = SizeOf(type);
    const std::int64_t own = counts[At(place_)];
    const auto* own_part = static_cast<const char*>(nullptr);
    const auto* part = static_cast<const char*>(in);
    for (int place = 0; place < size(); ++place) {
      const std::size_t bytes = static_cast<std::size_t>(counts[At(place)]) * element;
      if (place == place_) own_part = part;
      if (place != place_) transfers.Send(part, bytes, place);
      part += bytes;
    }
    std::vector<char> theirs(static_cast<std::size_t>(own) * element);
    for (int place = 0; place < size(); ++place) {
      if (place == place_) {
        Add(out, own_part, own, type, op, place);
        continue;
      }
      Transfers one = Begin();
      one.Receive(theirs.data(), theirs.size(), place);
      one.Wait();
      Add(out, theirs.data(), own, type, op, place);
    }
    transfers.Wait();
  }

  void Exchange(const void* mine, void* theirs, std::size_t bytes, int partner) override {
    Transfers transfers = Begin();
    transfers.Receive(theirs, bytes, partner);
    transfers.Send(mine, bytes, partner);
    transfers.Wait();
  }

  void AllGather(const void* mine, void* all, const std::vector<std::int64_t>& rows,
                 const TensorSpec& tensor) override {
    Gather(mine, all, BytesOf(rows, tensor));
  }

  // A binomial tree: each rank that has the data passes it on. The others wait for as long as that may take.
  void Broadcast(void* data, std::size_t bytes, int root) override {
    const int after_root = (place_ - root + size()) % size();
    int distance = 1;
    while (distance <= after_root) distance *= 2;
    if (after_root > 0) {
      Transfers transfers(*mesh_, channel_, ranks_, limit_s_, static_cast<double>(bytes) / kLeastBytesPerS);
      transfers.Receive(data, bytes, (after_root - distance / 2 + root) % size());
      transfers.Wait();
    }
    Transfers transfers = Begin();
    for (; after_root + distance < size(); distance *= 2)
      transfers.Send(data, bytes, (after_root + distance + root) % size());
    transfers.Wait();
  }

  void AllToAll(const void* in, const std::vector<std::int64_t>& sent, void* out,
                const std::vector<std::int64_t>& received, const TensorSpec& tensor) override {
    const std::vector<std::size_t> to = BytesOf(sent, tensor), from = BytesOf(received, tensor);
    Transfers transfers = Begin();
    const auto* source = static_cast<const char*>(in);
    auto* target = static_cast<char*>(out);
    for (int place = 0; place < size(); ++place) {
      if (place == place_) {
        std::memcpy(target, source, from[At(place)]);
      } else {
        transfers.Receive(target, from[At(place)], place);
        transfers.Send(source, to[At(place)], place);
      }
      source += to[At(place)];
      target += from[At(place)];
    }
    transfers.Wait();
  }

  void Free() override {}

 private:
  int size() const { return static_cast<int>(ranks_.size()); }
  static std::size_t At(int place) { return static_cast<std::size_t>(place); }
  Transfers Begin() { return Transfers(*mesh_, channel_, ranks_, limit_s_); }

  static std::vector<std::size_t> BytesOf(const std::vector<std::int64_t>& rows, const TensorSpec& tensor) {
    std::vector<std::size_t> bytes;
    for (const std::int64_t each : rows) bytes.push_back(tensor.BytesOfRows(each));
    return bytes;
  }

  // `sum` becomes what it is with the part of one more place.
  static void Add(void* sum, const void* part, std::int64_t count, Type type, ReduceOp op, int place) {
    if (place == 0) {
      if (count > 0) std::memmove(sum, part, static_cast<std::size_t>(count) * SizeOf(type));
    } else {
      Reduce(op, type, sum, part, count);
    }
  }

  void Gather(const void* mine, void* all, const std::vector<std::size_t>& bytes) {
    Transfers transfers = Begin();
    auto* target = static_cast<char*>(all);
    for (int place = 0; place < size(); ++place) {
      const std::size_t part = bytes[At(place)];
      if (place != place_) transfers.Receive(target, part, place);
      if (place == place_ && mine != target && part > 0) std::memcpy(target, mine, part);
      target += part;
    }
    for (int place = 0; place < size(); ++place) {
      if (place != place_) transfers.Send(mine, bytes[At(place_)], place);
    }
    transfers.Wait();
  }

  const std::shared_ptr<SocketMesh> mesh_;
  const SocketMesh::Channel channel_;
  const std::vector<int> ranks_;
  const double limit_s_;
  int place_ = 0;
};

class SocketLinks : public Links {
 public:
  SocketLinks(std::shared_ptr<SocketMesh> mesh, double limit_s)
      : mesh_(std::move(mesh)), limit_s_(limit_s), control_(mesh_->NewChannels()) {
    rank_ = mesh_->rank();
    size_ = mesh_->size();
  }

  void Send(int rank, std::string bytes, int tag) override {
    mesh_->SendText(std::make_shared<const std::string>(std::move(bytes)), rank, control_, tag);
  }
  std::optional<std::pair<int, std::string>> Receive(int tag) override {
    auto text = mesh_->TakeText(control_, tag);
    if (!text) return std::nullopt;
    return std::make_pair(text->rank, std::move(text->text));
  }
  bool Sent() override { return mesh_->AllWritten(control_); }
  std::vector<int> Lost() override { return mesh_->Lost(); }
  std::unique_ptr<SetLinks> MakeSet(const std::vector<int>& ranks) override {
    const SocketMesh::Channel channel = control_ + ++sets_;
    if (!std::binary_search(ranks.begin(), ranks.end(), rank_)) return nullptr;
    return std::make_unique<SocketSetLinks>(mesh_, channel, ranks, limit_s_);
  }
  void Free() override {}

 private:
  const std::shared_ptr<SocketMesh> mesh_;
  const double limit_s_;
  const SocketMesh::Channel control_;
  SocketMesh::Channel sets_ = 0;  // made so far
};

}  // namespace

std::unique_ptr<Links> MakeSocketLinks(std::shared_ptr<SocketMesh> mesh, double limit_s) {
  return std::make_unique<SocketLinks>(std::move(mesh), limit_s);
}

}  // namespace hvpipe::named
