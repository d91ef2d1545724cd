// Runs an engine from many threads at once, under mpirun: for a thread sanitizer.
//
//   engine_driver memory|ring|hosts|tcp [fail]
//
// `hosts` pretends that two ranks share a host. `tcp` uses MPI only to tell ranks where the others listen.
// `fail` ends the engine in the middle of a step. In one step rank 1 is so late that the watchdog reports it.
#include <mpi.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "progress/mpi_network.h"
#include "progress/socket_network.h"
#include "named/named_calls.h"

namespace {

using hvpipe::Engine;
using hvpipe::Error;

constexpr int kBuckets = 5, kSteps = 20, kMessages = 40, kCalls = 10, kLateStep = 3;
constexpr double kStallS = 0.2, kLateS = 1.5;
constexpr std::size_t kCount = 70'000;  // two chunks of the window, several segments of the ring

void NoInterrupt() {}

// Waits for a callback of the engine.
class Ended {
 public:
  hvpipe::Done done() {
    return [promise = promise_](const Error* error) {
      if (error == nullptr) return promise->set_value();
      promise->set_exception(std::make_exception_ptr(*error));
    };
  }
  void Wait() { promise_->get_future().get(); }

 private:
  std::shared_ptr<std::promise<void>> promise_ = std::make_shared<std::promise<void>>();
};

void Expect(double found, double wanted, const char* what) {
  if (found == wanted) return;
  throw Error(std::string(what) + " should be " + std::to_string(wanted) +
              ". Received: " + std::to_string(found));
}

// One bucket of one step, on a thread of its own.
void RunBucket(Engine& engine, int plan, int bucket, double scale, int ranks) {
  std::vector<float> gradient(kCount, 1.0f), sum(kCount);
  engine.buckets().Submit(plan, bucket, {gradient.data()}, scale);
  Ended ended;
  engine.buckets().Collect(plan, bucket, ended.done());
  ended.Wait();
  engine.buckets().Unpack(plan, bucket, {sum.data()});
  Expect(sum.back(), scale * ranks, "a bucket");
}

void RunMessages(Engine& engine) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  for (int i = 0; i < kMessages; ++i) {
    std::vector<float> sent(kCount, static_cast<float>(rank + i));
    const int from = (rank + size - 1) % size;
    Ended left, arrived;
    const auto received =
        engine.messenger().Receive(from, 3, kCount * sizeof(float), "message", arrived.done());
    engine.messenger().Send((rank + 1) % size, 3, sent.data(), kCount * sizeof(float), "message",
                            left.done());
    arrived.Wait();
    left.Wait();
    Expect(static_cast<const float*>(received->data())[kCount - 1], from + i, "a message");
  }
}

// The last bucket: numbers of one byte, on a thread of its own.
void RunBytes(Engine& engine, int plan) {
  std::vector<std::int8_t> codes(kCount, 3), sum(kCount);
  engine.buckets().Submit(plan, kBuckets, {codes.data()}, 1);
  Ended ended;
  engine.buckets().Collect(plan, kBuckets, ended.done());
  ended.Wait();
  engine.buckets().Unpack(plan, kBuckets, {sum.data()});
  Expect(sum.back(), 3 * engine.topology().size, "a bucket of int8");
}

// All-reduces by name. Several threads do this, so ranks make these calls in different orders.
void RunNamed(hvpipe::named::NamedCalls& service, int offset) {
  for (int i = 0; i < kCalls; ++i) {
    std::vector<float> values(100, 1.0f), sum(100);
    hvpipe::named::Call call;
    call.request.kind = hvpipe::named::Kind::kAllreduce;
    call.request.name = std::to_string(offset) + "/" + std::to_string(i);
    call.request.tensors = {{hvpipe::DType::kFloat32, {100}}};
    call.inputs = {values.data()};
    call.allocate = [&sum](int, const hvpipe::named::Shape&) { return sum.data(); };
    (void)service.Run(std::move(call), NoInterrupt);
    Expect(sum.back(), service.size(), "a sum by name");
  }
}

double Begin(Engine& engine, int plan, int step) {
  Ended ended;
  auto scale = std::make_shared<double>(0);
  engine.buckets().BeginStep(plan, step, 1, true,
                             [scale, done = ended.done()](const Error* error, double found, double) {
                               *scale = found;
                               done(error);
                             });
  ended.Wait();
  return *scale;
}

void RunSteps(Engine& engine, bool fails) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  std::vector<hvpipe::BucketLayout> layouts;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    layouts.emplace_back("bucket " + std::to_string(bucket), hvpipe::DType::kFloat32, hvpipe::DType::kFloat32,
                         std::vector<std::size_t>{kCount}, bucket);
  }
  layouts.emplace_back("codes", hvpipe::DType::kInt8, hvpipe::DType::kInt8, std::vector<std::size_t>{kCount},
                       kBuckets);
  const int plan = 3;
  engine.buckets().AddPlan(plan, "model", 7, layouts);
  for (int step = 0; step < kSteps; ++step) {
    if (rank == 1 && step == kLateStep) std::this_thread::sleep_for(std::chrono::duration<double>(kLateS));
    const double scale = Begin(engine, plan, step);
    std::vector<std::future<void>> running;
    running.push_back(std::async(std::launch::async, RunBytes, std::ref(engine), plan));
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      running.push_back(
          std::async(std::launch::async, RunBucket, std::ref(engine), plan, bucket, scale, size));
    }
    if (fails && step == kSteps / 2) engine.Fail(Error("the end of the test"));
    std::vector<float> values(100, 1.0f);
    engine.calls().AllReduce(values.data(), values.data(), values.size(), hvpipe::DType::kFloat32, 1.0,
                             "allreduce", NoInterrupt);
    Expect(values.back(), size, "an all-reduce");
    values.assign(100, static_cast<float>(rank));
    engine.calls().Broadcast(values.data(), 400, size - 1, "broadcast", NoInterrupt);
    Expect(values.back(), size - 1, "a broadcast");
    for (auto& bucket : running) bucket.get();
    (void)engine.calls().Agree("end of a step", 0, NoInterrupt);
  }
  engine.buckets().RemovePlan(plan);
}

// A listening or calling socket on loopback.
int Loopback(int port, bool listens) {
  const int made = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<in_port_t>(port));
  const auto* const at = reinterpret_cast<const sockaddr*>(&address);
  const bool done = listens ? bind(made, at, sizeof address) == 0 && listen(made, SOMAXCONN) == 0
                            : connect(made, at, sizeof address) == 0;
  if (!done) throw Error("the driver should have a socket");
  return made;
}

int PortOf(int listener) {
  sockaddr_in address{};
  socklen_t bytes = sizeof address;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes);
  return ntohs(address.sin_port);
}

// Each rank calls the lower ones, and says its number.
std::shared_ptr<hvpipe::SocketMesh> Mesh() {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int listener = Loopback(0, true), own_port = PortOf(listener);
  std::vector<int> ports(static_cast<std::size_t>(size));
  MPI_Allgather(&own_port, 1, MPI_INT, ports.data(), 1, MPI_INT, MPI_COMM_WORLD);
  hvpipe::Sockets sockets{rank, std::vector<int>(ports.size(), -1), {}};
  sockets.processes.resize(ports.size(), hvpipe::ProcessName::Own());
  for (int peer = 0; peer < rank; ++peer) {
    const int made = Loopback(ports[static_cast<std::size_t>(peer)], false);
    if (send(made, &rank, sizeof rank, 0) != sizeof rank) throw Error("the driver should send");
    sockets.connected[static_cast<std::size_t>(peer)] = made;
  }
  for (int left = size - 1 - rank; left > 0; --left) {
    int peer = 0;
    const int made = accept(listener, nullptr, nullptr);
    if (recv(made, &peer, sizeof peer, MSG_WAITALL) != sizeof peer) throw Error("the driver should receive");
    sockets.connected[static_cast<std::size_t>(peer)] = made;
  }
  close(listener);
  for (const int each : sockets.connected) {
    if (each >= 0) hvpipe::Tune(each);
  }
  return std::make_shared<hvpipe::SocketMesh>(sockets);
}

void Run(const hvpipe::EngineOptions& options, bool tcp, bool fails) {
  const auto mesh = tcp ? Mesh() : nullptr;
  std::vector<int> hosts(tcp ? static_cast<std::size_t>(mesh->size()) : 0);
  const auto owned = std::make_shared<Engine>(
      tcp ? hvpipe::OverSockets(mesh, {hosts, ""}) : hvpipe::OverMpi(MPI_COMM_WORLD), options);
  Engine& engine = *owned;
  hvpipe::named::NamedCalls& service = engine.named_calls();
  std::atomic<bool> stop{false};
  std::thread sampler([&] {
    std::uint64_t seen = 0;
    while (!stop) {
      seen += engine.counters().operations.value();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (seen == 0) std::puts("no operation was counted");
  });
  auto messages = std::async(std::launch::async, RunMessages, std::ref(engine));
  std::vector<std::future<void>> named;
  for (int offset = 0; offset < 3; ++offset) {
    named.push_back(std::async(std::launch::async, [&service, offset] { RunNamed(service, offset); }));
  }
  std::string error;
  try {
    RunSteps(engine, fails);
    messages.get();
  } catch (const Error& failure) {
    error = failure.what();
    engine.Fail(failure);  // ends the messages
  }
  if (messages.valid()) messages.wait();
  for (auto& each : named) fails ? each.wait() : each.get();
  service.Leave();
  if (!fails && engine.watchdog().report().empty() && engine.topology().rank == 0) {
    throw Error("the watchdog should have reported rank 1");
  }
  stop = true;
  sampler.join();
  engine.Stop();
  // A rank that closes ends what the others have under way, and with `fail` they may not have come so far.
  if (mesh) MPI_Barrier(MPI_COMM_WORLD);
  if (mesh) mesh->Close(2);
  if (error != (fails ? "the end of the test" : "")) throw Error(error);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "memory";
  int level = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  hvpipe::EngineOptions options;
  options.timeout_s = 60;
  options.stall_warn_s = kStallS;
  options.shared_memory = mode != "ring";
  options.ranks_per_host = mode == "hosts" ? 2 : 0;
  try {
    Run(options, mode == "tcp", argc > 2 && std::strcmp(argv[2], "fail") == 0);
  } catch (const std::exception& error) {
    std::printf("rank %d: %s\n", rank, error.what());
    std::fflush(stdout);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  std::printf("rank %d: right\n", rank);
  MPI_Finalize();
  return 0;
}
