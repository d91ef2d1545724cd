// The ranks of a group take their devices one after another, and sum by NCCL.
#include "gpu/group_reduce.h"

#include <string>
#include <utility>
#include <vector>

#include "collectives/message.h"
#include "collectives/tags.h"
#include "gpu/device_stages.h"

namespace hvpipe {
namespace {

// Ranks that wait for the first one of the group give it this time to say which rank is late.
constexpr double kGraceS = 1;

MessageOptions OptionsFor(int member, const GroupReduce& reduce) {
  MessageOptions options;
  options.peer = member;
  options.tag = static_cast<int>(reduce.call % kCallTags);
  return options;
}

// A signal of another rank of the group, which says in errors what this rank waits for.
class ReadySignal : public MessageReceive {
 public:
  ReadySignal(Transport& members, Counters& counters, void* data, std::size_t bytes,
              const MessageOptions& options, const char* awaited, double grace_s)
      : MessageReceive(members, counters, data, bytes, options),
        waiting_("rank " + std::to_string(members.RankInJob(options.peer)) + " " + awaited),
        grace_s_(grace_s) {}
  std::string Waiting() const override { return waiting_; }
  double GraceS() const override { return grace_s_; }

 private:
  const std::string waiting_;
  const double grace_s_;
};

// Throws on the first rank of a group if another one sums something else.
void CheckSame(const Transport& members, const GroupReduce& reduce) {
  for (std::size_t i = 0; i < reduce.others.size(); ++i) {
    const GroupReduce::Summand& other = reduce.others[i];
    if (other.count == reduce.mine.count && other.dtype == reduce.mine.dtype) continue;
    const auto text = [](const GroupReduce::Summand& one) {
      return std::to_string(one.count) + " numbers of " + NameOf(static_cast<DType>(one.dtype));
    };
    throw Error("The ranks of a group should sum arrays of one size and dtype. Received: " +
                    text(reduce.mine) + " on rank " + std::to_string(members.RankInJob(0)) + ", " +
                    text(other) + " on rank " + std::to_string(members.RankInJob(static_cast<int>(i) + 1)),
                ErrorKind::kMismatch);
  }
}

// Returns whether NCCL has launched the all-reduce.
bool Launch(RankDevice& device, Channel& channel, const Transport& members, GroupReduce& reduce) {
  const CurrentDevice current(*device.device);
  if (!channel.ranks) {
    device.Connect(channel, std::make_unique<NcclCommunicator>(*device.library, device.device, members.rank(),
                                                               members.size(), reduce.id));
  }
  if (!channel.ranks->Ready()) return false;
  const Device::Stream stream = device.message_stream.get();
  if (!std::exchange(reduce.called, true)) {
    channel.ranks->AllReduce(reduce.memory.get(), reduce.memory.get(), reduce.count, reduce.dtype, stream);
    if (!channel.ranks->ReadySoon()) return false;
  }
  device.device->Record(reduce.ended.get(), stream);
  return true;
}

}  // namespace

void GroupReducer::AddStages(Operation& operation, const std::shared_ptr<GroupReduce>& reduce) {
  OrderQueue* const order = messenger_.OrderOf(reduce->group, reduce->call);
  if (!device_.messages_by_nccl()) return AddThroughHost(operation, reduce, order);
  AddArrival(operation, *device_.device, nullptr, reduce->begun.get());
  AddTurn(operation, reduce, order);
  AddNccl(operation, reduce, order);
}

void GroupReducer::AddThroughHost(Operation& operation, const std::shared_ptr<GroupReduce>& reduce,
                                  OrderQueue* order) {
  void* const data = reduce->memory.get();
  void* const host = reduce->host_memory.get();
  const Device::Stream down = device_.download_stream.get(), up = device_.upload_stream.get();
  AddCopy(operation, *device_.device, reduce->begun.get(), reduce->ended.get(), down,
          [=](Device& on) { on.CopyToHost(host, data, reduce->bytes(), down); });
  operation.AddStage(
      [=, &network = network_](const Operation&) {
        reduce->copied_from.reset();
        return network.MakeGroupAllReduce(reduce->group, reduce->call, host, reduce->count, reduce->dtype);
      },
      order);
  AddCopy(operation, *device_.device, nullptr, reduce->ended.get(), up,
          [=](Device& on) { on.CopyFromHost(data, host, reduce->bytes(), up); });
}

// Take the device when all ranks of the group are ready and those below this one have taken theirs. The
// first rank knows who is late, so its deadline comes first.
void GroupReducer::AddTurn(Operation& operation, const std::shared_ptr<GroupReduce>& reduce,
                           OrderQueue* order) {
  Transport* const members = &network_.TransportOf(reduce->group);
  RankDevice* const device = &device_;
  Counters* const counters = &counters_;
  Channel* const channel = &device_.ChannelOf(reduce->group);
  const int member = members->rank();
  operation.AddStage(
      [=](const Operation&) {
        reduce->copied_from.reset();
        std::vector<std::unique_ptr<Collective>> signals;
        if (member > 0) {
          signals.push_back(std::make_unique<MessageSend>(*members, *counters, &reduce->mine,
                                                          sizeof reduce->mine, OptionsFor(0, *reduce)));
        } else {
          reduce->others.resize(static_cast<std::size_t>(members->size() - 1));
          for (int other = 1; other < members->size(); ++other) {
            signals.push_back(std::make_unique<ReadySignal>(
                *members, *counters, &reduce->others[static_cast<std::size_t>(other - 1)],
                sizeof reduce->mine, OptionsFor(other, *reduce), "to have its part of the sum", 0.0));
          }
        }
        return std::make_unique<ConcurrentCollectives>(std::move(signals));
      },
      order);
  if (member > 0) {
    operation.AddStage(
        [=](const Operation&) {
          return std::make_unique<ReadySignal>(*members, *counters, &reduce->id, sizeof reduce->id,
                                               OptionsFor(member - 1, *reduce), "to begin the sum", kGraceS);
        },
        order);
  }
  const auto take = [=] {
    if (!device->Take()) return false;
    if (member > 0) return true;
    CheckSame(*members, *reduce);
    if (!channel->ranks) {
      const CurrentDevice current(*device->device);
      reduce->id = device->library->NewId();
    }
    return true;
  };
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceLaunch>(take, "an earlier message or sum of this rank");
  });
}

void GroupReducer::AddNccl(Operation& operation, const std::shared_ptr<GroupReduce>& reduce,
                           OrderQueue* order) {
  Transport* const members = &network_.TransportOf(reduce->group);
  RankDevice* const device = &device_;
  Counters* const counters = &counters_;
  Channel* const channel = &device_.ChannelOf(reduce->group);
  operation.AddStage(
      [=](const Operation&) {
        std::vector<std::unique_ptr<Collective>> both;
        if (const int next = members->rank() + 1; next < members->size()) {
          both.push_back(std::make_unique<MessageSend>(*members, *counters, &reduce->id, sizeof reduce->id,
                                                       OptionsFor(next, *reduce)));
        }
        both.push_back(
            std::make_unique<DeviceLaunch>([=] { return Launch(*device, *channel, *members, *reduce); }));
        return std::make_unique<ConcurrentCollectives>(std::move(both));
      },
      order);
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceArrival>(*device->device, channel->ranks.get(), reduce->ended.get());
  });
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceLaunch>([=] {
      device->Release();
      return true;
    });
  });
}

}  // namespace hvpipe
