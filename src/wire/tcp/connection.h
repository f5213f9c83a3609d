// One socket of the TCP channel and its reading and writing state. What the bytes mean is the
// session's affair, when to connect is the channel's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "wire/handshake.h"
#include "wire/protocol.h"
#include "wire/tcp/page_lender.h"
#include "wire/tcp/socket.h"

namespace paceline::wire {

struct Connection {
  enum class Role {
    kAccepting,  ///< came in, has not proven itself yet
    kDialing,    ///< goes out, has not been accepted yet
    kControl,
    kDataOut,
    kDataIn,
    kClosing,  ///< its refusal still has to leave
  };

  Descriptor fd;
  Role role = Role::kAccepting;
  Rank peer = -1;
  Purpose purpose;
  Time deadline = 0;          ///< of the handshake
  bool is_connected = false;  ///< connect() has ended well
  bool wants_write = false;   ///< EPOLLOUT is asked for
  std::optional<Handshake> handshake;

  // Handshake and control stream.
  std::vector<std::byte> in;  ///< bytes in_begin … in_end are not parsed yet
  std::size_t in_begin = 0;
  std::size_t in_end = 0;
  std::vector<std::byte> out;  ///< bytes from out_begin on have not left
  std::size_t out_begin = 0;

  // Data, outgoing.
  bool is_writable = true;
  bool has_piece = false;
  Piece piece;
  std::size_t piece_sent = 0;  ///< bytes of header and payload that have left

  // Data: the header of the piece that leaves or comes.
  std::array<std::byte, kFrameHeader> header{};
  std::size_t header_have = 0;
  bool has_frame = false;
  Frame frame;
  std::size_t payload_have = 0;
  /// For a piece that goes to a sink, or that nobody wants any more: from Shared::spare, until it is complete.
  std::vector<std::byte> scratch;

  [[nodiscard]] bool is_open() const { return fd.valid(); }
  [[nodiscard]] bool has_output() const { return out_begin < out.size(); }
};

/// What a read or write ended with.
enum class IoEnd {
  kBlocked,    ///< the socket has, or takes, no more now
  kBudget,     ///< there may be more; others are due first
  kBroken,     ///< end of file or an error: `errno_value` (0: end of file)
  kViolation,  ///< the peer broke the protocol
};
struct IoResult {
  IoEnd end = IoEnd::kBlocked;
  int error = 0;
  Status violation;
};

/// Writes what `out` holds.
IoResult flush_output(Connection& c, Counters& counters);
/// Fills `in`; appends at most what its capacity allows.
IoResult fill_input(Connection& c, Counters& counters);
/// Hands complete frames of `in` to the session.
IoResult parse_control(Connection& c, Session& session);
/// Refills `out` from the session and writes, until one of both has no more.
IoResult pump_control(Connection& c, Session& session, Counters& counters);
/// Sends the rest of the current piece, or the next one. Sets is_writable to false when the socket
/// is full. kBudget: one piece has left, there may be more.
/// Long pieces go without a copy where there is a `lender` and it can.
IoResult pump_piece(Connection& c, Session& session, PageLender* lender, Shared& shared);
/// Reads pieces straight to where they belong.
IoResult read_pieces(Connection& c, Session& session, Shared& shared);

}  // namespace paceline::wire
