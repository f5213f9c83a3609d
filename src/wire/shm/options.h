// What a shared-memory channel is made from. Nothing here is read from the environment.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/types.h"
#include "wire/shm/allocator.h"

namespace paceline::wire::shm {

struct ShmOptions {
  Rank rank = 0;
  Rank size = 1;
  std::string secret;  ///< the job's, of any length: every connection proves it
  std::string
      version;  ///< of wire, build and settings (at most 256 bytes); peers that differ are refused

  /// Directory for the socket file; empty: an abstract name, which needs no file system.
  std::string socket_directory;
  MemorySources sources;
  /// Of buffers that peers read in place; null: the channel has one of its own for its slots.
  std::shared_ptr<ShmAllocator> allocator;

  uint64_t ring_bytes = 128 * 1024;       ///< per direction and peer; a power of two from 64 KiB on
  uint64_t eager_limit = 8 * 1024;        ///< longer messages wait for their receive and are pulled
  uint64_t eager_budget = 1024 * 1024;    ///< eager bytes per peer that may wait for their receive
  uint64_t chunk_bytes = 256 * 1024;      ///< one step of a pull
  uint64_t progress_bytes = 1024 * 1024;  ///< pulled by one call of progress(), over all peers
  /// The same for each of several threads that read peers' memory together.
  uint64_t worker_bytes = 2 * 1024 * 1024;
  uint64_t slot_bytes = 64 * 1024;  ///< of private memory that a peer answers, or can't read
  uint32_t slots = 8;               ///< a peer; together they fit the second cache

  bool use_vm_read = true;  ///< process_vm_readv, where a probe finds it working
  bool use_arena = true;    ///< read peers' ShmAllocator memory in place
  /// Declares this process readable for all processes of the same user, where yama restricts that.
  bool relax_yama = false;
};

}  // namespace paceline::wire::shm
