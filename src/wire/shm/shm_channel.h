// The channel among the ranks of one node, over shared memory.
//
// Connections are made on first use: a handshake over a unix socket that proves the job's secret
// (handshake.h), then two rings in shared memory (ring.h). Long messages are pulled by their
// receiver (conversation.h). The socket stays open: its end, or the end of the peer's process, is
// the loss of that peer, at once.
//
//   ShmOptions options{.rank = …, .size = …, .secret = …};
//   auto channel = ShmChannel::create(options);      // kUnavailable, kResourceExhausted: use
//   another way publish(channel->address());                     // through bootstrap
//   channel->set_peer(rank, address, host);          // for every rank of the node but this one
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "wire/channel.h"
#include "wire/shm/allocator.h"
#include "wire/shm/options.h"

namespace paceline::wire::shm {

class ShmChannel : public Channel {
 public:
  /// Fails where this machine has no unix sockets or no shared memory: the node's ranks then use
  /// another way.
  static Result<std::unique_ptr<ShmChannel>> create(ShmOptions options);

  /// What the other ranks of the node hand to set_peer(): at most 108 bytes of text.
  [[nodiscard]] virtual std::string address() const = 0;
  /// Before the first request with that rank. `host` is for messages.
  virtual void set_peer(Rank rank, const std::string& address, const std::string& host) = 0;
  /// Of buffers that peers read in place: ShmOptions::allocator, or the channel's own.
  [[nodiscard]] virtual const std::shared_ptr<ShmAllocator>& allocator() const = 0;
};

}  // namespace paceline::wire::shm
