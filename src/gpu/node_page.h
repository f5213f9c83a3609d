// How far the ranks of a node are, in a page of memory that their processes share.
//
// A meeting over the wire wakes a thread on each of them: 50 to 300 µs, which nothing hides at the end of an all-reduce. Whoever
// looks at flags anyway sees a word of this page a microsecond after it was written. The page only says it sooner: deadlines,
// and names of who is late, are those of the meeting that is under way over the wire all the same.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/shared_memory.h"
#include "base/status.h"

namespace paceline::gpu {

class NodePage {
 public:
  static constexpr size_t kTicketBytes = 32;
  /// What they meet for: gradients that they have given to each other, results that are in place.
  enum class For : uint8_t { kGiven, kInPlace };
  static constexpr std::array kAll{For::kGiven, For::kInPlace};

  /// By one rank of the node. kResourceExhausted: no shared memory, with the fix.
  static Result<NodePage> make(int ranks);
  /// By the others, with the ticket of who made it. kUnavailable: it can't be reached from this process (another namespace of
  /// processes, another user, a ticket of nobody).
  static Result<NodePage> open(std::string_view ticket, int ranks);
  /// kTicketBytes bytes by which processes of this machine find it, while settled() was not called.
  [[nodiscard]] std::string ticket() const;
  /// By who made it, when all who will have opened it: its descriptor is given back.
  void settled() { memory_->close_fd(); }

  /// Local rank `rank` has come to operation `sequence`: what it wrote before can be read by who sees it in through().
  /// Sequences only grow.
  void put(int rank, For what, uint64_t sequence);
  /// To which operation all ranks of the node have come.
  [[nodiscard]] uint64_t through(For what) const;

  /// Local rank `rank` has `bytes` to send on its wire `wire` (of at most kMostWires): link_share.h.
  void put_waiting(int rank, int wire, uint64_t bytes);
  /// What it has put there; none: nothing yet.
  [[nodiscard]] std::optional<uint64_t> waiting(int rank, int wire) const;

 private:
  using Memory = std::shared_ptr<SharedMemory>;
  NodePage(Memory memory, int ranks) : memory_(std::move(memory)), ranks_(ranks) {}
  [[nodiscard]] uint64_t* word(int rank, For what) const;
  [[nodiscard]] uint64_t* waiting_word(int rank, int wire) const;

  Memory memory_;  ///< one mapping for ranks that are threads of one process
  int ranks_ = 0;
};

}  // namespace paceline::gpu
