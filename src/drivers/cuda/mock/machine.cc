#include "drivers/cuda/mock/machine.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "drivers/cuda/mock/state.h"

namespace paceline::drivers::cuda {
namespace {

// How often heads that wait for a flag are looked at: nobody tells a device that host memory has changed.
constexpr auto kLook = std::chrono::microseconds(50);

}  // namespace

StreamTag* ContextTag::add_stream() {
  auto stream = std::make_unique<StreamTag>();
  stream->device = this;
  const auto limit = static_cast<size_t>(options->hardware_queues);
  if (limit == 0 || queues.size() < limit) {
    stream->queue = queues.size();
    queues.emplace_back();
  } else {
    stream->queue = streams.size() % limit;
  }
  streams.push_back(std::move(stream));
  return streams.back().get();
}

void ContextTag::enqueue(mock::Item item) {
  const std::lock_guard inside(driver);
  std::unique_lock lock(mutex);
  const auto has_room = [&] {
    return lost != 0 || queues[item.stream->queue].size() < options->queue_room;
  };
  if (options->queue_room > 0)
    changed.wait_for(lock, std::chrono::duration<double>(options->patience_s), has_room);
  ++item.stream->enqueued;
  if (item.stream->capturing) ++counts.captured;
  if (item.waits_for_value) {
    ++counts.pending_waits;
    if (item.stream->pending_waits++ == 0) ++counts.streams_in_wait;
    counts.most_streams_in_wait = std::max(counts.most_streams_in_wait, counts.streams_in_wait);
  }
  item.number = ++issued;
  unfinished.insert(item.number);
  if (item.barrier) barriers.insert(item.number);
  queues[item.stream->queue].push_back(std::move(item));
  changed.notify_all();
}

bool ContextTag::may_run(const mock::Item& item) const {
  if (!barriers.empty() && item.number > *barriers.begin()) return false;
  if (item.barrier && item.number > *unfinished.begin()) return false;
  return !item.ready || item.ready();
}

void ContextTag::work() {
  std::unique_lock lock(mutex);
  std::vector<size_t> runnable;
  while (!stopping) {
    runnable.clear();
    if (lost == 0) {
      for (size_t q = 0; q < queues.size(); ++q) {
        if (!queues[q].empty() && may_run(queues[q].front())) runnable.push_back(q);
      }
    }
    if (runnable.empty()) {
      const bool any =
          std::any_of(queues.begin(), queues.end(), [](auto& q) { return !q.empty(); });
      if (any && lost == 0)
        changed.wait_for(lock, kLook);
      else
        changed.wait(lock);
      continue;
    }
    const size_t q = runnable[random() % runnable.size()];
    const int pause = options->delays_us > 0 && random() % 4 == 0
                          ? static_cast<int>(random() % static_cast<uint64_t>(options->delays_us))
                          : 0;
    // The head stays in its queue while it runs; deques keep references when others are appended, but queues may grow.
    auto run = queues[q].front().run;
    running = true;
    lock.unlock();
    if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    if (run) run();
    lock.lock();
    running = false;
    mock::Item item = std::move(queues[q].front());
    queues[q].pop_front();
    unfinished.erase(item.number);
    if (item.barrier) barriers.erase(item.number);
    if (item.finish) item.finish();
    if (item.waits_for_value) {
      --counts.pending_waits;
      if (--item.stream->pending_waits == 0) --counts.streams_in_wait;
    }
    ++item.stream->completed;
    changed.notify_all();
  }
}

bool ContextTag::wait_idle(std::unique_lock<std::mutex>& lock) {
  const auto idle = [&] {
    return (lost != 0 && !running) ||
           std::all_of(queues.begin(), queues.end(), [](const auto& q) { return q.empty(); });
  };
  return changed.wait_for(lock, std::chrono::duration<double>(options->patience_s), idle);
}

namespace mock {
namespace {

std::atomic<Machine::State*> the_machine{nullptr};

}  // namespace

Machine::State* machine() { return the_machine.load(); }

CudaResult Machine::State::enter(const char* function, ContextTag* device) {
  {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    std::lock_guard lock(mutex);
    ++calls_by_name[name];
    const int ordinal = device == nullptr ? -1 : device->ordinal;
    ++calls[{function, ordinal}];
    ++calls_by_thread[{std::this_thread::get_id(), function}];
    for (auto& f : faults) {
      if (f.countdown > 0 && f.function == function && (f.device < 0 || f.device == ordinal) &&
          --f.countdown == 0)
        return f.error;
    }
  }
  if (device == nullptr) return 0;
  const std::scoped_lock lock(device->driver, device->mutex);
  return device->lost;
}

Machine::Machine(const Options& options) : state_(std::make_unique<State>()) {
  static std::atomic<uint64_t> machines{0};
  state_->options = options;
  state_->number = ++machines;
  for (int i = 0; i < options.devices; ++i) {
    auto device = std::make_unique<ContextTag>();
    device->ordinal = i;
    device->options = &state_->options;
    device->random.seed(options.seed * 1000003 + static_cast<uint64_t>(i));
    device->legacy = device->add_stream();
    device->thread = std::thread([d = device.get()] { d->work(); });
    state_->devices.push_back(std::move(device));
  }
  Machine::State* none = nullptr;
  if (!the_machine.compare_exchange_strong(none, state_.get()))
    throw std::logic_error("one simulated machine at a time");
}

Machine::~Machine() {
  for (auto& d : state_->devices) {
    {
      std::lock_guard lock(d->mutex);
      d->stopping = true;
      d->changed.notify_all();
    }
    d->thread.join();
  }
  the_machine.store(nullptr);
  for (auto& d : state_->devices) {
    for (auto& [address, bytes] : d->memory) std::free(reinterpret_cast<void*>(address));
    for (auto& [address, bytes] : d->pinned) std::free(reinterpret_cast<void*>(address));
  }
}

const Api& Machine::api() const { return functions(); }

void Machine::add_kernel(const std::string& name, KernelBody body) {
  std::lock_guard lock(state_->mutex);
  state_->kernels[name].body = std::move(body);
}

void Machine::expect_faults() { state_->faulty = true; }

bool Machine::expects_faults() const { return state_->faulty; }

void Machine::fail(const std::string& function, int nth, CudaResult error, int device) {
  expect_faults();
  std::lock_guard lock(state_->mutex);
  state_->faults.push_back({function, device, nth, error});
}

void Machine::lose(int device, CudaResult error) {
  expect_faults();
  auto& d = *state_->devices[static_cast<size_t>(device)];
  std::lock_guard lock(d.mutex);
  d.lost = error;
  d.changed.notify_all();
}

uint64_t Machine::calls_of_threads(const std::string& name) const {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->calls_by_name.find(name);
  return found == state_->calls_by_name.end() ? 0 : found->second;
}

uint64_t Machine::calls(const std::string& function, int device) const {
  std::lock_guard lock(state_->mutex);
  uint64_t sum = 0;
  for (const auto& [key, n] : state_->calls) {
    if (key.first == function && (device < 0 || key.second == device)) sum += n;
  }
  return sum;
}

uint64_t Machine::calls_of_this_thread(const std::string& function) const {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->calls_by_thread.find({std::this_thread::get_id(), function});
  return found == state_->calls_by_thread.end() ? 0 : found->second;
}

std::vector<std::string> Machine::called() const {
  std::lock_guard lock(state_->mutex);
  std::vector<std::string> names;
  for (const auto& [key, n] : state_->calls) {
    if (names.empty() || names.back() != key.first) names.push_back(key.first);
  }
  return names;
}

Machine::Counts Machine::counts(int device) const {
  const auto& d = *state_->devices[static_cast<size_t>(device)];
  std::lock_guard lock(d.mutex);
  return d.counts;
}

bool Machine::wait_idle(int device) {
  auto& d = *state_->devices[static_cast<size_t>(device)];
  std::unique_lock lock(d.mutex);
  return d.wait_idle(lock);
}

bool Machine::wait_idle(Stream stream) {
  std::unique_lock lock(stream->device->mutex);
  return stream->device->wait_idle(lock);
}

void Machine::add_task(Stream stream, Task task) {
  auto* device = stream->device;
  Item item;
  item.stream = stream;
  item.ready = std::move(task.ready);
  item.run = std::move(task.run);
  device->enqueue(std::move(item));
}

void Machine::add_barrier(Stream stream, int device) {
  auto& d = *state_->devices[static_cast<size_t>(device)];
  Item item;
  item.stream = d.resolve(stream);
  item.barrier = true;
  d.enqueue(std::move(item));
}
void Machine::capture(Stream stream, bool capturing) {
  const std::lock_guard lock(stream->device->mutex);
  stream->capturing = capturing;
}

}  // namespace mock
}  // namespace paceline::drivers::cuda
