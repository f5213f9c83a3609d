// What a paceline_comm holds, and how failures reach the caller.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/settings.h"
#include "base/status.h"
#include "base/workers.h"
#include "bootstrap/join.h"
#include "engine/engine.h"
#include "engine/runner.h"
#include "paceline/comm.h"

/// Destroyed from below to above: runner, engine, workers, job.
struct paceline_comm {
  uint64_t fork_generation = 0;
  paceline::Settings settings;
  std::unique_ptr<paceline::bootstrap::Job> job;
  paceline::engine::EngineOptions options;
  std::unique_ptr<paceline::Workers> workers;
  std::unique_ptr<paceline::engine::Engine> engine;
  std::unique_ptr<paceline::engine::Runner> runner;
  std::string description;
  double timeout_s = 0;
  int job_local_size = 1;  ///< as the launcher tells
  bool speaks = false;     ///< warns of settings, for the whole job
  std::atomic<bool> has_met_gradients{false};

  mutable std::mutex companions_mutex;
  std::vector<paceline_comm*> companions;  ///< that live
  int companions_made = 0;
  paceline::wire::Counters companions_past;  ///< of those that were destroyed
  paceline_comm* primary = nullptr;          ///< of a companion
  std::atomic<uint64_t> even_rate{0};        ///< its even part of the link, bytes/s; 0: no limit
};

namespace paceline::capi {

/// Remembers the sentence for paceline_error() on this thread and returns the code. `comm`: the handle that was called,
/// which need not be one that may be used; null: none.
paceline_code report(const paceline_comm* comm, const Status& status);
/// The last sentence of this thread about the handle; null: about anything. "" when that call succeeded.
const char* last_error(const paceline_comm* comm);
/// The handle is about to go: another may come at its address.
void forget_errors(const paceline_comm* comm);
paceline_code invalid(const paceline_comm* comm, const std::string& what);

/// How often this process is the child of a fork: handles of an earlier generation are not to be touched.
uint64_t fork_generation();
/// Ok when `comm` may be used here.
Status usable(const paceline_comm* comm);

#define PACELINE_USABLE(comm)                                                  \
  do {                                                                         \
    if (auto paceline_usable = paceline::capi::usable(comm); !paceline_usable) \
      return paceline::capi::report(comm, paceline_usable);                    \
  } while (0)

/// Copies a caller's struct that begins with its size: what an older caller does not know stays at its default.
template <class T>
bool take_struct(const T* from, T& to) {
  if (from == nullptr || from->struct_size < sizeof(size_t)) return false;
  std::memcpy(&to, from, std::min(from->struct_size, sizeof(T)));
  return true;
}
/// The reverse: fills what the caller has room for.
template <class T>
bool give_struct(T& from, T* to) {
  if (to == nullptr || to->struct_size < sizeof(size_t)) return false;
  auto size = to->struct_size;
  from.struct_size = size;
  std::memcpy(to, &from, std::min(size, sizeof(T)));
  return true;
}

/// companion.cc. Bytes of this communicator and of its companions.
wire::Counters counters_with_companions(const paceline_comm& comm);
/// Before a communicator is freed: a companion leaves its counters behind, a primary lets go of its companions.
void leave_companions(paceline_comm& comm);

/// companion.cc. PACELINE_LINK_RATE is dealt evenly to the ranks of a node, and a rank's to this communicator and its
/// companions. Whenever one comes or goes.
void share_link(paceline_comm& primary);

/// Memory that the node's other ranks can read in place; plain memory where that is not to be had.
void* allocate_shared_memory(paceline_comm& comm, size_t bytes);
void free_shared_memory(paceline_comm& comm, void* memory);
Status share_memory(paceline_comm& comm, void* data, size_t bytes);
Status unshare_memory(paceline_comm& comm, void* data);

/// Copies text out, always ended by a zero where there is room; returns its full length.
size_t copy_text(const std::string& text, char* to, size_t capacity);

/// Runs `f` so that nothing thrown (in effect: no memory) crosses the C ABI.
template <class F>
paceline_code guarded(const paceline_comm* comm, F&& f) noexcept {
  try {
    return f();
  } catch (const std::exception& e) {
    try {
      return report(comm, {Code::kResourceExhausted, e.what()});
    } catch (...) {
      return PACELINE_RESOURCE_EXHAUSTED;
    }
  }
}

}  // namespace paceline::capi
