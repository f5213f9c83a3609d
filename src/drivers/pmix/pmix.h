// PMIx, found at run time (libpmix.so.2, which Open MPI brings): what Open MPI's mpirun and newer Slurms use to tell
// processes of each other. Only the part that bootstrap needs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/status.h"

namespace paceline::drivers {

class PmixClient {
 public:
  virtual ~PmixClient() = default;
  [[nodiscard]] virtual uint32_t rank() const = 0;
  virtual Status put(const std::string& key, const std::string& value) = 0;
  /// What was put is handed to the launcher.
  virtual Status commit() = 0;
  /// Blocks until every process of the job has called it.
  virtual Status fence() = 0;
  /// What process `rank` has put and fenced; nullopt: nothing.
  virtual Result<std::optional<std::string>> get(uint32_t rank, const std::string& key) = 0;
  /// A name that every process of the job can look up at once, whatever fence it waits in. kUnavailable: the launcher
  /// has no place for it.
  virtual Status publish(const std::string& name) = 0;
  virtual Result<bool> is_published(const std::string& name) = 0;
};

/// kUnavailable: no libpmix.so.2, or no launcher that speaks PMIx. The connection lasts until its last user and
/// the process's end: PMIx counts its users, so that an MPI library in the same process keeps its own.
Result<std::shared_ptr<PmixClient>> open_pmix();

}  // namespace paceline::drivers
