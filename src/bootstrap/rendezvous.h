// Picks the key-value space, the secret and the address to listen on: what has to be settled before
// the ranks can speak to each other.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/identity.h"
#include "bootstrap/join.h"
#include "bootstrap/secret.h"

namespace paceline::bootstrap {

struct Rendezvous {
  std::shared_ptr<KeyValue> space;
  std::optional<Secret> secret;  ///< unset: rank 0 hands one out in the (private) space
  std::string bind_address;      ///< numeric
};

/// Environment as in the C library's getenv().
std::optional<std::string> process_environment(const std::string& name);

/// The key-value space that the launcher itself provides. kUnavailable: it has none that can be reached.
Result<std::shared_ptr<KeyValue>> launcher_space(const Identity& identity);
/// The address that this rank listens on: of the interface that the settings name, of the route to rank 0's host,
/// loopback where all ranks are on this machine, else of the first interface that leads somewhere.
Result<std::string> own_address(const Settings& settings, const Identity& identity);

Result<Rendezvous> find_rendezvous(const JoinOptions& options, const Identity& identity);

}  // namespace paceline::bootstrap
