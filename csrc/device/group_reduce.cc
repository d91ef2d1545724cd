// The ranks of a group take their devices one after another, and sum by NCCL.
#include "device/group_reduce.h"

#include <utility>
#include <vector>

#include "collectives/message.h"
#include "collectives/tags.h"
#include "device/device_stages.h"

namespace hvpipe {
namespace {

MessageOptions OptionsFor(int member, const GroupReduce& reduce) {
  MessageOptions options;
  options.peer = member;
  options.tag = static_cast<int>(reduce.call % kCallTags);
  return options;
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
  if (!device_.nccl_connects_all()) return AddThroughHost(operation, reduce);
  AddArrival(operation, *device_.device, nullptr, reduce->begun.get());
  AddTurn(operation, reduce);
  AddNccl(operation, reduce);
}

void GroupReducer::AddThroughHost(Operation& operation, const std::shared_ptr<GroupReduce>& reduce) {
  reduce->host_memory = device_.host_pool.Take(reduce->bytes());
  void* const data = reduce->memory.get();
  void* const host = reduce->host_memory.get();
  const Device::Stream down = device_.download_stream.get(), up = device_.upload_stream.get();
  AddCopy(operation, *device_.device, reduce->begun.get(), reduce->ended.get(), down,
          [=](Device& on) { on.CopyToHost(host, data, reduce->bytes(), down); });
  operation.AddStage([=, &network = network_](const Operation&) {
    return network.MakeGroupAllReduce(reduce->group, reduce->call, host, reduce->count, reduce->dtype);
  });
  AddCopy(operation, *device_.device, nullptr, reduce->ended.get(), up,
          [=](Device& on) { on.CopyFromHost(data, host, reduce->bytes(), up); });
}

// Take the device when all ranks of the group are ready and those below this one have taken theirs.
void GroupReducer::AddTurn(Operation& operation, const std::shared_ptr<GroupReduce>& reduce) {
  Transport* const members = &network_.TransportOf(reduce->group);
  RankDevice* const device = &device_;
  Counters* const counters = &counters_;
  Channel* const channel = &device_.ChannelOf(reduce->group);
  const int member = members->rank();
  operation.AddStage([=](const Operation&) {
    std::vector<std::unique_ptr<Collective>> signals;
    if (member > 0) {
      signals.push_back(
          std::make_unique<MessageSend>(*members, *counters, nullptr, 0, OptionsFor(0, *reduce)));
    } else {
      for (int other = 1; other < members->size(); ++other) {
        signals.push_back(
            std::make_unique<MessageReceive>(*members, *counters, nullptr, 0, OptionsFor(other, *reduce)));
      }
    }
    return std::make_unique<ConcurrentCollectives>(std::move(signals));
  });
  if (member > 0) {
    operation.AddStage([=](const Operation&) {
      return std::make_unique<MessageReceive>(*members, *counters, &reduce->id, sizeof reduce->id,
                                              OptionsFor(member - 1, *reduce));
    });
  }
  const auto take = [=] {
    if (!device->Take()) return false;
    if (member == 0 && !channel->ranks) {
      const CurrentDevice current(*device->device);
      reduce->id = device->library->NewId();
    }
    return true;
  };
  operation.AddStage([=](const Operation&) {
    return std::make_unique<DeviceLaunch>(take, "messages of this rank before it");
  });
}

void GroupReducer::AddNccl(Operation& operation, const std::shared_ptr<GroupReduce>& reduce) {
  Transport* const members = &network_.TransportOf(reduce->group);
  RankDevice* const device = &device_;
  Counters* const counters = &counters_;
  Channel* const channel = &device_.ChannelOf(reduce->group);
  operation.AddStage([=](const Operation&) {
    std::vector<std::unique_ptr<Collective>> both;
    if (const int next = members->rank() + 1; next < members->size()) {
      both.push_back(std::make_unique<MessageSend>(*members, *counters, &reduce->id, sizeof reduce->id,
                                                   OptionsFor(next, *reduce)));
    }
    both.push_back(
        std::make_unique<DeviceLaunch>([=] { return Launch(*device, *channel, *members, *reduce); }));
    return std::make_unique<ConcurrentCollectives>(std::move(both));
  });
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
