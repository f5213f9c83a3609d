// Names for the operations of graphs: one per call site, equal on all ranks, or a refusal; never the wrong partner.
//
// A node of a graph has the name that it was traced with. That is one name for many operations once the function that
// holds the node is called at several places, or a loop runs it over and over, and ranks may come to these in different
// orders. The queue would match the k-th with the k-th. What the executor tells of a node keeps them apart:
//
//   path       what inlining put before the node's traced name ("PartitionedCall_3"): the calls that lead to it. It
//              is part of the name only where one traced function has several paths, since it also counts what else a
//              rank has built. All paths are then part of the signature, so that ranks whose graphs differ there fail.
//   iteration  of the loop around the node: part of the name. Of nested loops only the innermost is known; from the
//              second run of an inner loop on, its frame (a hash of the outer iterations) is part of the signature.
//
// What still has one name is refused: a second node with it in one step, and an operation whose name is under way, from
// a graph or from another thread.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace paceline::agreement {

/// A node that an executor has made. Made by whoever owns it, added once, then used by one CallSites only.
struct CallSite {
  std::string name;  ///< what the ranks agree by
  std::string
      trace;  ///< the traced function; empty: no graph, an operation that is called by itself
  std::string path;  ///< call_path()
  int64_t step = 0;  ///< CallSites' own: of the last run
  uint64_t first_frame = 0;
};

/// The calls that lead to the node `node`, which was traced as `traced`. Counters of the graph's rewriting ("/_12") are
/// left out. The whole name, where `traced` is no end of it.
std::string call_path(std::string_view node, std::string_view traced);

/// Thread-safe.
class CallSites {
 public:
  struct Run {
    std::string name;     ///< for the queue; end() wants it back, unless it was refused
    std::string note;     ///< to be added to the signature
    bool is_one = true;   ///< false: shares its traced name with other call sites or iterations
    std::string refusal;  ///< not empty: it must not run
  };
  /// Before any operation of its graph runs.
  void add(const CallSite& site);
  /// The site is executed: `step` is one execution of the whole graph, `frame` 0 outside of loops.
  Run begin(CallSite& site, int64_t step, uint64_t frame, int64_t iteration);
  void end(const std::string& name);

 private:
  struct UnderWay {
    int count = 0;
    bool graph = false;
    std::thread::id thread;
  };
  struct LastRun {
    int64_t step = 0;
    const CallSite* site = nullptr;
    std::string path;
  };
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::set<std::string>> paths_;  ///< by trace, name
  std::map<std::string, UnderWay> under_way_;
  std::map<std::string, LastRun> last_;
};

}  // namespace paceline::agreement
