#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iterator>

#include "cli/bench/bench.h"
#include "cli/text/checks.h"
#include "cli/text/units.h"

namespace paceline::bench {

namespace {

constexpr const char* kCodecs[] = {"none", "fp16", "bf16", "topk"};

/// Of the number that the size's text has become. A sign wraps around there, and what is rounded up to pages must not.
std::string is_size(const std::string& bytes) {
  uint64_t number = 0;
  const bool is_good = CLI::detail::lexical_cast(bytes, number) && number <= uint64_t{1} << 60;
  return is_good ? "" : "a size is from 0 to 1EiB";
}

/// 0 stands for the settings' share inside, so nobody may ask for it.
std::string is_share(const std::string& text) {
  double share = 0;
  const bool is_good = CLI::detail::lexical_cast(text, share) && share > 0 && share <= 1;
  return is_good ? "" : "a share is above 0 and at most 1, not " + text;
}

/// 0 stands for none inside.
std::string is_rate(const std::string& text) {
  auto rate = cli::parse_rate(text);
  return rate && *rate > 0 ? "" : "a rate such as 1gbit or 300mbit is wanted, not " + text;
}

std::string is_latency(const std::string& text) {
  auto latency = cli::parse_duration(text);
  const bool is_good = latency && latency->count() > 0 && *latency <= std::chrono::seconds(10);
  return is_good ? "" : "a time above 0 and up to 10s is wanted, such as 50us or 2ms, not " + text;
}

}  // namespace

int collective_code(const std::string& operation) {
  const std::vector<std::string> names = {"allreduce", "broadcast", "allgather", "reducescatter",
                                          "alltoall"};
  auto at = std::find(names.begin(), names.end(), operation);
  return at == names.end() ? -1 : static_cast<int>(at - names.begin());
}

int dtype_code(const std::string& name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (dtype_name(static_cast<DType>(i)) == name) return i;
  }
  return -1;
}

int codec_code(const std::string& name) {
  const auto* at = std::find(std::begin(kCodecs), std::end(kCodecs), name);
  return at == std::end(kCodecs) ? -1 : static_cast<int>(at - kCodecs);
}

const char* codec_word(plan::Codec codec) { return kCodecs[static_cast<std::size_t>(codec)]; }

void declare(CLI::App& command, Options& o) {
  command
      .add_option("operation", o.operation,
                  "allreduce, broadcast, allgather, reducescatter or alltoall")
      ->check(CLI::IsMember({"allreduce", "broadcast", "allgather", "reducescatter", "alltoall"}))
      ->required();
  command
      .add_option(
          "--bytes", o.bytes,
          "Sizes, separated by commas: 4,64KiB,64MiB. The buffer of all-reduce and broadcast, the "
          "whole of all blocks elsewhere")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->check(is_size);
  command.add_option("--dtype", o.dtype, "Element type")
      ->check(CLI::IsMember({"float32", "float64", "float16", "bfloat16", "int32", "int64"}))
      ->capture_default_str();
  command
      .add_option("--codec", o.codec,
                  "How elements travel between nodes (settings: as the settings say)")
      ->check(CLI::IsMember({"none", "fp16", "bf16", "topk", "settings"}))
      ->capture_default_str();
  command.add_option("--ratio", o.ratio, "top-k: share of the elements kept")->check(is_share);
  command.add_option("--algorithm", o.algorithm, "The plan's algorithm")
      ->check(CLI::IsMember({"auto", "ring", "doubling", "tree", "direct", "two_level", "sparse"}))
      ->capture_default_str();
  command
      .add_option("--buffers", o.buffers,
                  "private memory, shared: from paceline_alloc, or exchanged: private memory after "
                  "paceline_share")
      ->check(CLI::IsMember({"private", "shared", "exchanged"}))
      ->capture_default_str();
  command.add_flag("--out-of-place", o.out_of_place,
                   "All-reduce and broadcast into a buffer of its own");
  command
      .add_option("--iterations", o.iterations,
                  "Operations per row and side (default: as fit into --seconds)")
      ->check(CLI::Range(1, 1'000'000));
  command.add_option("--seconds", o.seconds, "Time per row and side")
      ->check(cli::number_from(0.01, 3600))
      ->capture_default_str();
  command.add_option("--turns", o.turns, "Blocks that each side's operations are divided into")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  auto* json =
      command.add_option("--json", o.json, "Append one JSON line a row and side to this file");
  auto* versus = command.add_option("--vs", o.versus, "Measure a peer in turns with ours: gloo")
                     ->check(CLI::IsMember({"gloo"}));
  command.add_option("--python", o.python, "Interpreter that has torch, for --vs gloo");
  command
      .add_option("--link", o.link,
                  "Rate of a node's link for the floor, such as 1gbit (inside a lab: the lab's)")
      ->check(is_rate);
  auto* plan = command
                   .add_flag("--plan", o.plan,
                             "Run nothing: show the plan of each size, the bytes of every node's "
                             "link and the time that they take")
                   ->excludes(json)
                   ->excludes(versus);
  command.add_option("--rank", o.plan_rank, "With --plan: whose (default: 0)")
      ->check(CLI::Range(0, 4095))
      ->needs(plan);
  command.add_option("--steps", o.plan_steps, "With --plan: the most steps that are shown (24)")
      ->check(CLI::Range(0, 1'000'000))
      ->needs(plan);
  command
      .add_option("--latency", o.latency,
                  "With --plan: of a message between two nodes, such as 50us (inside a lab: what "
                  "its --delay takes)")
      ->check(is_latency)
      ->needs(plan);
  command.add_option("--np", o.np, "Start so many ranks on this machine")
      ->check(CLI::Range(1, 4096));
}

}  // namespace paceline::bench
