// The communicator between the nodes, through its C ABI alone: libpaceline_cuda.so shares no C++ object with
// libpaceline.so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "paceline/comm.h"

namespace paceline::gpu {

/// Who hears, once, what an operation has ended with; see comm.h for what the call may do.
struct Notice {
  paceline_notify_fn call = nullptr;
  void* context = nullptr;
};

/// Thread-safe, as comm.h is. The handle outlives it.
class Wire {
 public:
  explicit Wire(paceline_comm* comm) : comm_(comm) {}

  Result<paceline_identity> identity() const;
  /// Blocks: `bytes` of each rank, by rank. All ranks call it.
  Result<std::vector<std::string>> gather(const std::string& mine, size_t bytes,
                                          const char* name) const;
  /// any_length, on both sides: a receive takes at most `bytes`.
  Result<paceline_op> send(int rank, uint32_t tag, const void* data, uint64_t bytes,
                           const char* name, bool any_length = false, Notice notice = {}) const;
  Result<paceline_op> receive(int rank, uint32_t tag, void* data, uint64_t bytes, const char* name,
                              bool any_length = false, Notice notice = {}) const;
  /// The largest of all ranks' words, in place. `shape` is compared among the ranks.
  Result<paceline_op> largest(int32_t* word, const char* name, const char* shape,
                              Notice notice = {}) const;
  /// A group of these ranks, whose members call meet() in the same order.
  Result<uint32_t> group(const std::vector<int>& ranks) const;
  Status end_group(uint32_t group) const;
  /// Ends when all ranks of the group have called it.
  Result<paceline_op> meet(uint32_t group, const char* name, Notice notice = {}) const;
  /// What a notice said in a word.
  [[nodiscard]] Status ended(paceline_op op, paceline_code code) const;
  Status wait(paceline_op op) const;
  Status health() const;
  /// See paceline_comm_hold().
  void hold(const char* why) const;
  /// See paceline_comm_weigh().
  void weigh(double parts) const;
  void abort(const std::string& reason) const;
  /// The same, all ranks get the status' own code.
  void abort(const Status& why) const;
  /// Ends it with what another wire of the same ranks has met, word for word.
  void fail(const Status& failure) const;
  /// The handle is freed; all ranks call it.
  Status destroy() const;

 private:
  paceline_comm* comm_;
};

/// Another communicator of the same ranks, with connections and a thread of its own. Collective.
Result<paceline_comm*> make_companion(paceline_comm* comm);

/// One of the settings, as text.
std::string setting(const char* name);

}  // namespace paceline::gpu
