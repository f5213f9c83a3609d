// The job's secret: where it comes from, and what each source protects against.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"
#include "base/status.h"
#include "bootstrap/identity.h"

namespace paceline::bootstrap {

enum class SecretSource {
  kSetting,        ///< PACELINE_SECRET (also what `paceline run` hands its ranks)
  kFile,           ///< PACELINE_SECRET_FILE
  kOpenMpi,        ///< the transport key that mpirun makes for every job
  kLauncherSpace,  ///< made by rank 0, handed over in the launcher's own key-value space
  kLocal,          ///< all ranks on this machine: derived from it, the user and the job
};

struct Secret {
  SecretSource source = SecretSource::kSetting;
  std::vector<std::byte> bytes;
};

/// What can be had without asking other ranks; nullopt: it has to travel in a private key-value
/// space. kInvalidArgument: PACELINE_SECRET is too short, the file can't be read or is readable by
/// others.
Result<std::optional<Secret>> find_secret(const Settings& settings, const Identity& identity,
                                          const Environment& get);
/// For jobs whose ranks all listen on loopback: no other machine can connect; other users of this
/// one can guess it.
Secret local_secret(const Identity& identity);
/// The key that PACELINE_SECRET=text stands for.
std::vector<std::byte> secret_from_text(const std::string& text);
/// 32 random bytes as hexadecimal digits.
std::string make_secret();

/// "PACELINE_SECRET: keeps out … (… can)", for doctor.
std::string describe_secret(SecretSource source);

}  // namespace paceline::bootstrap
