// Key-value spaces that need no protocol of ours: callbacks of the C ABI (torch's store), a map in
// memory.
#pragma once

#include <map>
#include <memory>

#include "bootstrap/kv.h"
#include "paceline/comm.h"

namespace paceline::bootstrap {

/// A store handed in through the C ABI: over the callbacks of comm.h, which are used while paceline_comm_create() runs, on
/// its thread.
class StoreKeyValue final : public KeyValue {
 public:
  explicit StoreKeyValue(const paceline_store& store) : store_(store) {}
  Status put(const std::string& key, const std::string& value) override;
  Result<std::optional<std::string>> get(const std::string& key) override;
  Status poll(Time) override { return {}; }
  [[nodiscard]] std::string describe() const override { return "the caller's store"; }
  /// It is the job's own store (torchrun's, say): whoever can read it is in the job already, so where nobody set a secret,
  /// rank 0's travels by it. It protects as far as that store's port is protected; PACELINE_SECRET protects further.
  [[nodiscard]] bool is_private() const override { return true; }
  [[nodiscard]] bool outlives_ranks() const override { return true; }

 private:
  paceline_store store_;
};

/// All ranks in one process: the simulation's and the tests'. Counts what it is asked.
class MemoryKeyValue final : public KeyValue {
 public:
  struct Space {
    std::map<std::string, std::string> entries;
    uint64_t puts = 0;
    uint64_t gets = 0;
  };
  explicit MemoryKeyValue(std::shared_ptr<Space> space) : space_(std::move(space)) {}
  Status put(const std::string& key, const std::string& value) override;
  Result<std::optional<std::string>> get(const std::string& key) override;
  Status poll(Time) override { return {}; }
  [[nodiscard]] std::string describe() const override { return "memory"; }
  [[nodiscard]] bool is_private() const override { return true; }

 private:
  std::shared_ptr<Space> space_;
};

}  // namespace paceline::bootstrap
