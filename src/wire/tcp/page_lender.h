// Sends memory over a socket without a copy: vmsplice(2) puts references to the caller's pages into a
// pipe, splice(2) moves them on into the socket, whose packets then point at the pages.
//
// MSG_ZEROCOPY would do the same for a real network card, but the kernel copies such packets after
// all wherever they meet a virtual interface (containers, namespaces), and tells through an error
// queue when the memory is free again. Nothing has to tell here: the protocol ends a long message
// only when the receiver has said that all of it is there. A packet that the kernel sends once more
// after that is a duplicate to the receiver's TCP, which drops it unread.
//
// So memory stays lent from send_some() until the message is known to have arrived; who gives up
// before that has to make sure that nothing leaves the socket any more (TcpChannelImpl::stop_pieces).
// Between two machines that is possible. On one machine (namespaces, containers) the receiver's queue
// holds the very pages until they are read: an aborted operation's memory, written to at once, may be
// seen there. That is why the default is to lend to other machines only (PACELINE_ZERO_COPY).
//
// One pipe serves a whole channel: what the socket does not take is dropped from the pipe and lent
// again later. The number of descriptors does not grow with peers.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

#include "wire/tcp/socket.h"

namespace paceline::wire {

class PageLender {
 public:
  /// Shorter payloads are cheaper to copy.
  static constexpr std::size_t kWorthwhile = 16 * 1024;

  /// `wanted` false: never used. Where a sandbox forbids the calls it turns itself off at its first use; for want of
  /// descriptors memory is copied meanwhile, which the log says once.
  explicit PageLender(bool wanted) : usable_(wanted) {}

  [[nodiscard]] bool usable() const { return usable_; }
  /// True once memory has been lent.
  [[nodiscard]] bool has_lent() const { return lent_; }

  enum class Outcome {
    kSent,
    kBlocked,     ///< the socket takes no more now
    kBroken,      ///< `error` says why
    kUnsuitable,  ///< this memory can't be lent (a device's, for example): copy it
  };
  struct Sent {
    Outcome outcome = Outcome::kSent;
    std::size_t bytes = 0;  ///< that the socket took; > 0 exactly with kSent
    int error = 0;
  };
  /// Lends from the beginning of `data`, which must not be empty.
  Sent send_some(int socket, std::span<const std::byte> data);

 private:
  bool open();
  void close();
  void drop(std::size_t bytes);

  bool usable_;
  bool lent_ = false;
  Descriptor read_end_;
  Descriptor write_end_;
  Descriptor nowhere_;
  std::size_t at_once_ = 0;
};

}  // namespace paceline::wire
