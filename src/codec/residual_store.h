// The memory of error feedback: what top-k has not sent yet, kept by parameter and range, never by
// bucket (DDP rebuilds its buckets after the first iteration; a shard may begin in the middle of a
// parameter).
//
// Steps. Between two calls of commit() or rollback() lies one step. runs() hands out, for a range,
// where the residual before is read and where the one after is written; commit() makes what was
// written current, rollback() returns every range to its value before the step, in every bit,
// whichever and however many operations wrote it. Neither copies or touches a float. A range that
// is encoded again within a step reads what the first encoding wrote. Given keys, both end the
// step of these parameters alone: several models on one engine step at times of their own.
//
// Memory. Ranges get memory when they are first used, only those that this rank encodes: twice the
// residual (before and after). A third plane exists only while ranges are encoded more than once a
// step. Where a part of what was taken at once is handed over, what stays moves to memory of its own.
//
// Ranges of one parameter may be asked for in any cuts: [0, 100) today, [50, 150) tomorrow. Pieces
// are split where requests begin and end; no value moves or is lost. Not thread-safe: one engine,
// one thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "codec/codec.h"

namespace paceline::codec {

/// Elements [offset, offset + elements) of the parameter `key`.
struct ResidualRange {
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t elements = 0;
};

class ResidualStore {
 public:
  ResidualStore();
  ~ResidualStore();
  ResidualStore(const ResidualStore&) = delete;
  ResidualStore& operator=(const ResidualStore&) = delete;

  /// Appends the runs that hold elements [first, first + elements) of the concatenation of
  /// `ranges`, in order, to `out`. Elements never used before are 0. Each run must be encoded (its
  /// `after` written) before runs() is asked for the same elements again and before the step ends.
  /// kInvalidArgument: the ranges are shorter than first + elements, or one comes twice;
  /// kResourceExhausted: no memory. After an error nothing has changed.
  Status runs(std::span<const ResidualRange> ranges, uint64_t first, uint64_t elements,
              std::vector<ResidualRun>& out);

  /// For a rank that no longer encodes what it keeps residuals of, since its buckets are cut in another way: adds them to
  /// `gradient` (the concatenation of `ranges`), from where its group's sum brings them to whoever encodes them now.
  /// `own`: elements [begin, end) that this rank encodes, ascending. With the step's commit what was added is forgotten; a
  /// rollback brings it back. What this step has written already stays.
  void hand_over(std::span<const ResidualRange> ranges,
                 std::span<const std::pair<uint64_t, uint64_t>> own, float* gradient);

  void commit();
  void rollback();
  /// Of these parameters alone; keys that are not known are passed over. Operations on others may be under way.
  void commit(std::span<const uint64_t> keys);
  void rollback(std::span<const uint64_t> keys);
  /// Multiplies every residual, rounding once; what would become infinite stays the largest float, for an Inf would make
  /// every later step one that is taken back. kInvalidArgument unless factor is finite and above 0.
  Status scale(double factor);

  /// Copies parameter `key`'s committed residual, from its first element on; what was never used
  /// reads 0. kInvalidArgument when the parameter is known to be longer than `data`.
  Status read(uint64_t key, std::span<float> data) const;
  /// Sets it (committed; outside of a step's encodings). Memory is taken only from the first to the
  /// last element that isn't zero: a rank's own shard. kInvalidArgument when the step has already
  /// encoded a part of it, or one of them isn't finite. No elements: the parameter is gone, its memory free.
  Status write(uint64_t key, std::span<const float> data);

  struct Statistics {
    uint64_t elements = 0;  ///< residuals kept
    uint64_t bytes = 0;     ///< memory of all planes
    uint64_t pieces = 0;
    uint64_t parameters = 0;
  };
  [[nodiscard]] Statistics statistics() const;

 private:
  class Slab;
  struct Piece;
  using Pieces = std::map<uint64_t, Piece>;  ///< by first element; they don't overlap

  static void split_at(Pieces& pieces, uint64_t element);
  Status cover(uint64_t key, Pieces& pieces, uint64_t begin, uint64_t end);
  Status add_piece(uint64_t key, Pieces& pieces, uint64_t begin, uint64_t end);
  Status gather(const ResidualRange& range, std::vector<Piece*>& found);
  void hand_over(Pieces& pieces, uint64_t begin, uint64_t end, float* gradient);
  Status overwrite(uint64_t key, Pieces& pieces, std::span<const float> data);
  void commit(Pieces& pieces);
  void compact(Pieces& pieces);
  static void rollback(Pieces& pieces);
  void release_third_planes();

  std::unordered_map<uint64_t, Pieces> parameters_;
  uint64_t bytes_ = 0;
  bool chained_ = false;  ///< third planes may exist
};

}  // namespace paceline::codec
