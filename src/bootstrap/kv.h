// The seam under bootstrap: a small key-value space that all ranks of a job can reach before they
// know each other. Behind it: our own server (kv_tcp), the launcher's (PMI-1, PMIx), a store handed
// in through the C ABI (torch's), or the simulation's.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace paceline::bootstrap {

inline constexpr std::size_t kKeyLimit = 256;
inline constexpr std::size_t kValueLimit = 4096;

/// Non-blocking: bootstrap polls. Values are at most 4 KiB (PMI-1 implementations encode and split
/// them).
class KeyValue {
 public:
  virtual ~KeyValue() = default;
  /// Publishes; a key is written once. May be buffered until the next poll().
  virtual Status put(const std::string& key, const std::string& value) = 0;
  /// What this rank has put is to be seen by all others' get()s. Collective: every rank calls it
  /// equally often (the MPI launchers' spaces need that; others do nothing). Later get()s give
  /// nothing until it has happened.
  virtual Status fence() { return {}; }
  /// The value, nothing yet (ask again), or why it can't be had.
  virtual Result<std::optional<std::string>> get(const std::string& key) = 0;
  /// Says at once that somebody is here, by a name that others can look for before the fence. Nothing where get()
  /// shows what was put without a fence, or where the launcher has no place for it.
  virtual void announce(const std::string& /*name*/) {}
  /// Whether somebody has announced `name`; nullopt: this space can't tell.
  virtual std::optional<bool> announced(const std::string& /*name*/) { return std::nullopt; }
  /// Why nothing can be read at the moment; ok where there is no such reason.
  [[nodiscard]] virtual Status trouble() const { return {}; }
  /// Moves outstanding requests; call between get()s.
  virtual Status poll(Time now) = 0;
  /// "torch's store", "PMI-1 (Hydra)", "tcp://10.0.0.1:6666": for messages.
  [[nodiscard]] virtual std::string describe() const = 0;
  /// True where only processes of this job can read what is put here (so that a secret may travel
  /// in it).
  [[nodiscard]] virtual bool is_private() const = 0;
  /// True where what one start of the job has put may still be here when its ranks are started again (starts.h).
  [[nodiscard]] virtual bool outlives_ranks() const { return false; }
};

}  // namespace paceline::bootstrap
