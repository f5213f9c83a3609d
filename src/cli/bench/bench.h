// `paceline bench`: measures collectives through the C ABI, beside a peer's in the same run.
//
// Every rank of a job runs it. Time of one operation is the slowest rank's, from its own start to its own end. With
// a peer (--vs gloo) both sides take turns in blocks, in an order that is drawn for each turn, on equal buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "paceline/comm.h"
#include "plan/plan.h"

namespace CLI {
class App;
}

namespace paceline::bench {

struct Options {
  std::string operation = "allreduce";
  std::vector<uint64_t> bytes;  ///< empty: a ladder from 4 B to 64 MiB
  std::string dtype = "float32";
  std::string codec = "none";  ///< none, fp16, bf16, topk, settings
  std::string algorithm = "auto";
  double ratio = 0;                 ///< top-k; 0: the settings'
  std::string buffers = "private";  ///< or shared: paceline_alloc; exchanged: paceline_share
  bool out_of_place = false;
  int iterations = 0;   ///< per row and side; 0: as many as fit into `seconds`
  double seconds = 2;   ///< per row and side
  int turns = 8;        ///< blocks per side
  std::string json;     ///< file that rank 0 appends lines to
  std::string versus;   ///< "" or "gloo"
  std::string link;     ///< rate of a node's link, "1gbit"; empty: the lab's
  bool plan = false;    ///< show what would run, run nothing
  int plan_rank = 0;    ///< whose
  int plan_steps = 24;  ///< the most that are shown
  std::string latency;  ///< from node to node, "50us"; empty: the lab's
  int np = 0;           ///< start so many ranks here first
  std::string python;   ///< interpreter with torch, for --vs
};

/// Declares the flags.
void declare(CLI::App& command, Options& options);
/// Runs on this rank; the process's exit code.
int bench_main(const Options& options);

/// The collectives' codes in the C ABI, -1 for an unknown name.
int collective_code(const std::string& operation);
int dtype_code(const std::string& name);
/// -1 for "settings", as in the C ABI.
int codec_code(const std::string& name);
/// The word that asks for it.
const char* codec_word(plan::Codec codec);

}  // namespace paceline::bench
