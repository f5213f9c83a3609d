// Reading another process's memory (process_vm_readv), where the system allows it.
//
// Whether it does depends on user, pid namespace, yama, seccomp and dumpability; the only sure
// answer is a real read: each side of a connection publishes a random token in its own memory and
// tells the peer where it lies.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace paceline::wire::shm {

/// 0, or the errno of the read that failed. A short read continues; EFAULT where it can't.
int vm_read(pid_t pid, uint64_t address, void* into, std::size_t bytes);

using ProbeToken = std::array<std::byte, 32>;

/// Reads the token at `address` of `pid`. Empty: it is `expected`, so pid names the right process
/// and its memory can be read. Otherwise the reason, for people.
std::string probe_vm_read(pid_t pid, uint64_t address, const ProbeToken& expected);

/// Yama's "restricted ptrace" lets only declared processes read this one: declares all of the same
/// user.
void allow_vm_read_by_all();

}  // namespace paceline::wire::shm
