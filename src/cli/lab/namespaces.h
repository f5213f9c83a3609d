// What a lab may do on this machine, and how a thread works inside another network namespace.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"

namespace paceline::lab {

/// Makes sure that this process may create network namespaces: as it is (root), or by moving itself
/// into a user namespace of its own. kUnavailable says what is missing and what else can be done.
/// Call before there are threads. On success: how (kRoot, kUserNamespace).
Result<std::string> acquire_privileges();
inline constexpr const char* kRoot = "root";
inline constexpr const char* kUserNamespace = "user namespace";

struct Privileges {
  std::string how;      ///< as acquire_privileges() answers; empty: there is no way
  std::string missing;  ///< then: what a lab needs and has not, behind "no"
  Status status;        ///< then: the same for people, with what to do
};
/// What acquire_privileges() would answer, found out by children that try what a lab does; this process stays as it is.
Privileges probe_privileges();

/// What has all that a lab needs. Single capabilities do not (docker run --cap-add): a container's /proc/sys stays
/// read-only, and its AppArmor profile stops mounts.
inline constexpr const char* kAsRoot = "as root (sudo; in a container with --privileged)";
inline constexpr const char* kNextBest =
    "Next best here: --loopback runs the same ranks as plain processes, without link speeds";
/// With kNextBest behind it, where it is this machine (kUnavailable) that makes no lab.
Status with_next_best(Status failed);

/// Where ip and tc are; kUnavailable tells what to install.
Result<std::string> find_tool(const std::string& name);

/// Runs `work` on a thread of its own inside the network namespace that `path` names. Sockets
/// opened there stay in it.
Status in_namespace(const std::string& path, const std::function<Status()>& work);

/// Moves the calling thread. For threads of the lab that live in one namespace.
Status enter_namespace(const std::string& path);

}  // namespace paceline::lab
