#include "drivers/nccl/mock/cliques.h"

#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "device/cpu/casts.h"
#include "drivers/cuda/mock/unseen.h"

namespace paceline::drivers::nccl {

namespace mock {
namespace {

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast };

struct Call {
  Kind kind = Kind::kAllReduce;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  Type type = Type::kFloat32;
  int root = 0;
  bool operator==(const Call& o) const {
    return kind == o.kind && count == o.count && type == o.type && root == o.root;
  }
};

/// One kernel of a group of calls, over all ranks.
struct Launch {
  std::vector<std::vector<Call>> of_rank;
  std::vector<bool> arrived;
  std::vector<std::chrono::steady_clock::time_point> since;  ///< [ranks] at the head of its queue
  int made = 0;                                              ///< ranks that have called
  int arrivals = 0;
  int left = 0;
  bool done = false;
  bool broken = false;  ///< a rank aborted instead: the others wait until they abort too
};

struct Clique {
  int size = 0;
  int joined = 0;
  bool broken = false;
  bool aborted = false;                 ///< by a rank: those that it would connect with see it go
  std::map<uint64_t, Launch> launches;  ///< by sequence
  std::set<std::pair<Kind, int>> connected;
};

}  // namespace
}  // namespace mock

struct NcclCommTag {
  mock::Clique* clique = nullptr;
  int rank = 0;
  uint64_t next = 0;
  bool aborted = false;
  cuda::Stream stream = nullptr;  ///< of its last kernel
};

namespace mock {

struct Cliques::State {
  cuda::mock::Machine* machine = nullptr;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, std::unique_ptr<Clique>> cliques;
  std::vector<std::unique_ptr<NcclCommTag>> comms;
  int open = 0;
  int joining = 0;  ///< threads that wait for other ranks' calls
  std::string disagreement;
  std::map<std::string, uint64_t> calls;
  std::map<Kind, double> waited;  ///< seconds
  struct Fault {
    std::string function;
    int countdown = 0;
    NcclResult error = 0;
  };
  std::vector<Fault> faults;
};

namespace {

constexpr NcclResult kInvalidArgument = 4;
constexpr NcclResult kInternalError = 3;

Cliques::State* the_state = nullptr;
std::mutex beginning_and_end;  ///< of the_state, for threads that may have been left behind
/// The same number never stands for two cliques: a thread that was left behind by an earlier test may still come.
std::atomic<uint64_t> ids_given = 0;

/// The calls between group_start and group_end of this thread.
struct Group {
  int depth = 0;
  NcclResult error = 0;  ///< the first of its calls': nothing of it is launched then
  std::vector<std::pair<std::pair<NcclCommTag*, cuda::Stream>, std::vector<Call>>> kernels;
};
thread_local Group group;

NcclResult enter(const char* function) {
  auto* s = the_state;
  if (s == nullptr) return kInternalError;
  std::lock_guard lock(s->mutex);
  ++s->calls[function];
  for (auto& f : s->faults) {
    if (f.countdown == 0 || f.function != function || --f.countdown > 0) continue;
    if (group.depth > 0 && group.error == 0) group.error = f.error;
    return f.error;
  }
  return 0;
}

#define ENTER(name) \
  if (auto injected = enter(name); injected != 0) return injected

size_t size_of(Type t) { return t == Type::kFloat32 ? 4 : t == Type::kInt8 ? 1 : 2; }

void to_floats(std::vector<float>& to, const void* from, Type t, size_t first) {
  if (t == Type::kFloat32)
    std::memcpy(to.data(), static_cast<const float*>(from) + first, to.size() * sizeof(float));
  else
    cpu::widen(t == Type::kFloat16 ? DType::kFloat16 : DType::kBFloat16, to.data(),
               static_cast<const uint16_t*>(from) + first, 1, to.size());
}

void sum_into(const std::vector<const void*>& from, size_t first, void* to, size_t count, Type t) {
  std::vector<float> sums(count);
  std::vector<float> addends(count);
  for (const auto* f : from) {
    to_floats(addends, f, t, first);
    for (size_t i = 0; i < count; ++i) sums[i] += addends[i];
  }
  if (t == Type::kFloat32)
    std::memcpy(to, sums.data(), count * sizeof(float));
  else
    cpu::narrow(t == Type::kFloat16 ? DType::kFloat16 : DType::kBFloat16, to, sums.data(), 1,
                count);
}

/// Moves the data of one call of all ranks.
void perform(const std::vector<Call>& calls) {
  const Call& c = calls[0];
  const size_t n = c.count;
  const size_t item = size_of(c.type);
  std::vector<const void*> sends;
  sends.reserve(calls.size());
  for (const auto& call : calls) sends.push_back(call.send);
  if (c.kind == Kind::kAllReduce) {
    std::vector<std::byte> all(n * item);
    sum_into(sends, 0, all.data(), n, c.type);
    for (const auto& call : calls) std::memcpy(call.receive, all.data(), all.size());
  } else if (c.kind == Kind::kReduceScatter) {
    std::vector<std::byte> all(n * item * calls.size());
    sum_into(sends, 0, all.data(), n * calls.size(), c.type);
    for (size_t r = 0; r < calls.size(); ++r)
      std::memcpy(calls[r].receive, all.data() + r * n * item, n * item);
  } else if (c.kind == Kind::kAllGather) {
    std::vector<std::byte> all;
    for (const auto* s : sends) {
      const auto* b = static_cast<const std::byte*>(s);
      all.insert(all.end(), b, b + n * item);
    }
    for (const auto& call : calls) std::memcpy(call.receive, all.data(), all.size());
  } else {
    const void* from = sends[static_cast<size_t>(c.root)];
    for (const auto& call : calls) {
      if (call.receive != from) std::memcpy(call.receive, from, n * item);
    }
  }
}

void perform(Cliques::State& s, Launch& launch) {
  for (size_t i = 0; i < launch.of_rank[0].size(); ++i) {
    std::vector<Call> calls;
    for (const auto& mine : launch.of_rank) {
      if (mine.size() != launch.of_rank[0].size() || !(mine[i] == launch.of_rank[0][i])) {
        s.disagreement = "ranks issued different collectives on one communicator";
        return;
      }
      calls.push_back(mine[i]);
    }
    perform(calls);
  }
}

/// What is new to a communicator connects its ranks first: the host waits until all have made the call.
bool connect(Cliques::State& s, std::unique_lock<std::mutex>& lock, const NcclCommTag& comm,
             uint64_t sequence) {
  auto& clique = *comm.clique;
  const auto& calls = clique.launches[sequence].of_rank[static_cast<size_t>(comm.rank)];
  const std::pair kind{calls[0].kind, std::bit_width(calls[0].count * size_of(calls[0].type))};
  if (clique.connected.contains(kind)) return true;
  ++s.joining;
  s.changed.notify_all();
  s.changed.wait_for(lock, std::chrono::seconds(20), [&] {
    return comm.aborted || clique.aborted || clique.broken || clique.connected.contains(kind) ||
           clique.launches[sequence].made == clique.size;
  });
  --s.joining;
  if (clique.launches[sequence].made == clique.size) clique.connected.insert(kind);
  s.changed.notify_all();
  return clique.connected.contains(kind) && !comm.aborted;
}

NcclResult launch(NcclCommTag* comm, cuda::Stream stream, std::vector<Call> calls) {
  auto* s = the_state;
  uint64_t sequence = 0;
  {
    std::unique_lock lock(s->mutex);
    sequence = comm->next++;
    comm->stream = stream;
    auto& l = comm->clique->launches[sequence];
    const auto size = static_cast<size_t>(comm->clique->size);
    l.of_rank.resize(size);
    l.arrived.resize(size);
    l.since.resize(size);
    if (l.left == 0) l.left = comm->clique->size;
    l.of_rank[static_cast<size_t>(comm->rank)] = std::move(calls);
    ++l.made;
    if (!connect(*s, lock, *comm, sequence)) return kInternalError;
  }
  cuda::mock::Task task;
  task.ready = [s, comm, sequence] {
    std::lock_guard lock(s->mutex);
    auto& l = comm->clique->launches[sequence];
    const auto rank = static_cast<size_t>(comm->rank);
    if (!l.arrived[rank]) {
      l.arrived[rank] = true;
      l.since[rank] = std::chrono::steady_clock::now();
      ++l.arrivals;
    }
    return comm->aborted || l.done || (l.arrivals == comm->clique->size && !l.broken);
  };
  task.run = [s, comm, sequence] {
    std::lock_guard lock(s->mutex);
    auto& l = comm->clique->launches[sequence];
    if (!l.done && !comm->aborted) {
      const auto now = std::chrono::steady_clock::now();
      for (const auto since : l.since)
        s->waited[l.of_rank[0][0].kind] += std::chrono::duration<double>(now - since).count();
      {
        // A rank that has failed gives its memory back, whoever reads it.
        const cuda::mock::Unseen unseen(s->machine->expects_faults());
        perform(*s, l);
      }
      l.done = true;
    }
    l.broken = l.broken || !l.done;
    if (--l.left == 0) comm->clique->launches.erase(sequence);
  };
  s->machine->add_task(stream, std::move(task));
  return 0;
}

NcclResult issue(NcclCommTag* comm, cuda::Stream stream, const Call& call) {
  if (comm == nullptr) return kInvalidArgument;
  if (group.depth == 0) return launch(comm, stream, {call});
  for (auto& [key, calls] : group.kernels) {
    if (key.first == comm && key.second == stream) {
      calls.push_back(call);
      return 0;
    }
  }
  group.kernels.push_back({{comm, stream}, {call}});
  return 0;
}

NcclResult get_version(int* version) {
  *version = 22809;
  return 0;
}
const char* get_error_string(NcclResult error) {
  return error == 1 ? "unhandled cuda error" : error == 3 ? "internal error" : "error";
}
const char* get_last_error(Comm) { return "as the test asked for"; }
NcclResult get_unique_id(UniqueId* id) {
  ENTER("get_unique_id");
  const uint64_t number = ++ids_given;
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::memcpy(id->bytes, &number, sizeof number);
  return 0;
}
NcclResult comm_init_rank_config(Comm* comm, int ranks, UniqueId id, int rank, Config* config) {
  auto injected = enter("comm_init_rank_config");
  if (config->magic != 0xcafebeef || rank < 0 || rank >= ranks) return kInvalidArgument;
  uint64_t number = 0;
  std::memcpy(&number, id.bytes, sizeof number);
  std::unique_lock living(beginning_and_end);
  auto* s = the_state;
  if (s == nullptr) return kInternalError;
  std::unique_lock lock(s->mutex);
  living.unlock();  // the end waits for those who join
  auto& clique = s->cliques[number];
  if (!clique) clique = std::make_unique<Clique>();
  if (injected != 0) {  // the others see its connections close
    clique->broken = true;
    s->changed.notify_all();
    return injected;
  }
  clique->size = ranks;
  ++clique->joined;
  ++s->joining;
  s->changed.notify_all();
  const bool all = s->changed.wait_for(lock, std::chrono::seconds(20),
                                       [&] { return clique->broken || clique->joined == ranks; });
  --s->joining;
  s->changed.notify_all();
  if (!all || clique->broken) return kInternalError;
  s->comms.push_back(std::make_unique<NcclCommTag>());
  *comm = s->comms.back().get();
  (*comm)->clique = clique.get();
  (*comm)->rank = rank;
  ++s->open;
  return 0;
}
NcclResult comm_destroy(Comm comm) {
  ENTER("comm_destroy");
  std::lock_guard lock(the_state->mutex);
  (void)comm;
  --the_state->open;
  return 0;
}
NcclResult comm_abort(Comm comm) {
  ENTER("comm_abort");
  auto* s = the_state;
  std::unique_lock lock(s->mutex);
  if (!comm->aborted) --s->open;
  comm->aborted = comm->clique->aborted = true;
  s->changed.notify_all();
  const auto stream = comm->stream;
  lock.unlock();
  // Its memory is freed, for which CUDA waits until nothing is under way on the device.
  if (stream != nullptr && !cuda::mock::Machine::wait_idle(stream)) {
    lock.lock();
    s->disagreement = "an abort waited in vain until its device was idle";
  }
  return 0;
}
NcclResult comm_get_async_error(Comm, NcclResult* error) {
  ENTER("comm_get_async_error");
  *error = 0;
  return 0;
}
NcclResult group_start() {
  ENTER("group_start");
  ++group.depth;
  return 0;
}
NcclResult group_end() {
  auto injected = enter("group_end");
  if (--group.depth > 0) return injected;
  auto kernels = std::move(group.kernels);
  group.kernels.clear();
  if (auto error = std::exchange(group.error, 0); error != 0) return error;
  for (auto& [key, calls] : kernels) {
    if (auto error = launch(key.first, key.second, std::move(calls)); error != 0) return error;
  }
  return 0;
}
NcclResult all_reduce(const void* send, void* receive, size_t count, Type type, Op, Comm comm,
                      cuda::Stream stream) {
  ENTER("all_reduce");
  return issue(comm, stream, {Kind::kAllReduce, send, receive, count, type, 0});
}
NcclResult reduce_scatter(const void* send, void* receive, size_t count, Type type, Op, Comm comm,
                          cuda::Stream stream) {
  ENTER("reduce_scatter");
  return issue(comm, stream, {Kind::kReduceScatter, send, receive, count, type, 0});
}
NcclResult all_gather(const void* send, void* receive, size_t count, Type type, Comm comm,
                      cuda::Stream stream) {
  ENTER("all_gather");
  return issue(comm, stream, {Kind::kAllGather, send, receive, count, type, 0});
}
NcclResult broadcast(const void* send, void* receive, size_t count, Type type, int root, Comm comm,
                     cuda::Stream stream) {
  ENTER("broadcast");
  return issue(comm, stream, {Kind::kBroadcast, send, receive, count, type, root});
}

}  // namespace

Cliques::Cliques(cuda::mock::Machine& machine) : state_(std::make_unique<State>()) {
  state_->machine = &machine;
  if (the_state != nullptr) throw std::logic_error("one simulated NCCL at a time");
  the_state = state_.get();
}
Cliques::~Cliques() {
  std::unique_lock living(beginning_and_end);
  std::unique_lock lock(state_->mutex);
  the_state = nullptr;
  living.unlock();
  // Threads that were left behind in an initialisation that never completes.
  for (auto& [id, clique] : state_->cliques) clique->broken = true;
  state_->changed.notify_all();
  state_->changed.wait(lock, [&] { return state_->joining == 0; });
}

const Api& Cliques::api() const {
  static const Api api = [] {
    Api a;
    a.get_version = get_version;
    a.get_error_string = get_error_string;
    a.get_last_error = get_last_error;
    a.get_unique_id = get_unique_id;
    a.comm_init_rank_config = comm_init_rank_config;
    a.comm_destroy = comm_destroy;
    a.comm_abort = comm_abort;
    a.comm_get_async_error = comm_get_async_error;
    a.group_start = group_start;
    a.group_end = group_end;
    a.all_reduce = all_reduce;
    a.reduce_scatter = reduce_scatter;
    a.all_gather = all_gather;
    a.broadcast = broadcast;
    return a;
  }();
  return api;
}

void Cliques::fail(const std::string& function, int nth, NcclResult error) {
  state_->machine->expect_faults();
  std::lock_guard lock(state_->mutex);
  state_->faults.push_back({function, nth, error});
}
uint64_t Cliques::calls(const std::string& function) const {
  std::lock_guard lock(state_->mutex);
  auto found = state_->calls.find(function);
  return found == state_->calls.end() ? 0 : found->second;
}
double Cliques::waited(const std::string& function) const {
  const std::map<std::string, Kind> kinds = {{"all_reduce", Kind::kAllReduce},
                                             {"reduce_scatter", Kind::kReduceScatter},
                                             {"all_gather", Kind::kAllGather},
                                             {"broadcast", Kind::kBroadcast}};
  std::lock_guard lock(state_->mutex);
  const auto found = state_->waited.find(kinds.at(function));
  return found == state_->waited.end() ? 0 : found->second;
}
std::string Cliques::disagreement() const {
  std::lock_guard lock(state_->mutex);
  return state_->disagreement;
}
int Cliques::open() const {
  std::lock_guard lock(state_->mutex);
  return state_->open;
}

}  // namespace mock
}  // namespace paceline::drivers::nccl
