#include "cli/bench/report.h"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/file_errors.h"
#include "cli/standard_output.h"

namespace paceline::bench {
namespace {

// TCP in packets of 1,500 bytes carries this part of a link that is shaped by a token bucket.
constexpr double kSteadyShare = 0.95;

std::string optional_text(double value, const char* format) {
  return value > 0 ? fmt::format(fmt::runtime(format), value) : "-";
}

// "4 ranks on 4 nodes (torchrun) · tcp, 2 flows · …": the part between the first two dots.
std::string wire_of(const std::string& start_line) {
  const std::string dot = " · ";
  auto begin = start_line.find(dot);
  if (begin == std::string::npos) return start_line;
  begin += dot.size();
  return start_line.substr(begin, start_line.find(dot, begin) - begin);
}

}  // namespace

Result<Report> Report::open(const Options& options, const paceline_identity& who,
                            const std::string& start_line, double link) {
  Report r;
  r.options_ = options;
  r.who_ = who;
  r.start_line_ = start_line;
  r.link_ = link;
  if (!options.json.empty() && !std::ofstream(options.json, std::ios::app)) {
    return Status(Code::kInvalidArgument, cli::unwritable("--json " + options.json, errno, "file"));
  }
  auto head = fmt::format("# {}\n# {} of {}, {} buffers, {} cores\n", start_line, options.operation,
                          options.dtype, options.buffers, std::thread::hardware_concurrency());
  head += fmt::format("{:>10}  {:<8} {:>11} {:>11} {:>8} {:>11} {:>7} {:>8} {:>8}  {}\n", "bytes",
                      "side", "p50 us", "p99 us", "GB/s", "floor us", "of it", "pred.", "measured",
                      "plan");
  PACELINE_RETURN_IF_ERROR(cli::show(head));
  return r;
}

double Report::floor_us(const Row& row) const {
  return link_ > 0 ? static_cast<double>(row.predicted_bytes) * 8 / (link_ * kSteadyShare) * 1e6
                   : 0;
}

std::string Report::side(const Row& row, const Figures& f, const char* name) const {
  double p50 = f.percentile(0.5);
  double floor = floor_us(row);
  bool ours = &f == &row.ours;
  auto megabytes = [](uint64_t b) {
    return optional_text(static_cast<double>(b) / 1e6, "{:.2f} MB");
  };
  return fmt::format("{:>10}  {:<8} {:>11.1f} {:>11.1f} {:>8.2f} {:>11} {:>7} {:>8} {:>8}  {}\n",
                     plan::size_text(row.bytes), name, p50 * 1e6, f.percentile(0.99) * 1e6,
                     static_cast<double>(row.bytes) / p50 / 1e9, optional_text(floor, "{:.1f}"),
                     optional_text(100 * floor / (p50 * 1e6), "{:.1f} %"),
                     ours ? megabytes(row.predicted_bytes) : "-",
                     megabytes(f.link_bytes.value_or(0)),
                     ours ? row.plan : "torch " + row.peer_torch);
}

std::string Report::line(const Row& row, const Figures& f, bool peer) const {
  double p50 = f.percentile(0.5);
  nlohmann::ordered_json j;
  j["op"] = options_.operation;
  j["ranks"] = who_.size;
  j["nodes"] = who_.node_count;
  j["bytes"] = row.bytes;
  j["dtype"] = options_.dtype;
  j["plan"] = peer ? nlohmann::ordered_json() : nlohmann::ordered_json(row.plan);
  j["codec"] = peer ? "none" : row.codec;
  j["wire"] = peer ? "gloo" : wire_of(start_line_);
  j["us_p50"] = p50 * 1e6;
  j["us_p99"] = f.percentile(0.99) * 1e6;
  j["algbw"] = static_cast<double>(row.bytes) / p50 / 1e9;
  j["floor_us"] = link_ > 0 ? nlohmann::ordered_json(floor_us(row)) : nlohmann::ordered_json();
  j["bytes_predicted"] =
      peer ? nlohmann::ordered_json() : nlohmann::ordered_json(row.predicted_bytes);
  j["bytes_measured"] =
      f.link_bytes ? nlohmann::ordered_json(*f.link_bytes) : nlohmann::ordered_json();
  j["buffers"] = peer ? "private" : options_.buffers;
  j["iterations"] = f.seconds.size();
  j["cores"] = std::thread::hardware_concurrency();
  j["link_bps"] = link_ > 0 ? nlohmann::ordered_json(link_) : nlohmann::ordered_json();
  j["threads"] = peer ? row.peer_threads : row.threads;
  if (peer) {
    j["peer"] = options_.versus;
    j["torch"] = row.peer_torch;
  }
  return j.dump();
}

Status Report::add(const Row& row) {
  auto table = side(row, row.ours, "paceline");
  if (row.peer) {
    table += side(row, *row.peer, options_.versus.c_str());
    table += fmt::format("{:>10}  {:.3f} x {}'s time", "",
                         row.ours.percentile(0.5) / row.peer->percentile(0.5), options_.versus);
    if (row.threads != row.peer_threads)
      table += fmt::format(", threads: {} of ours, {} of theirs", row.threads, row.peer_threads);
    table += "\n";
  } else if (!row.peer_refusal.empty()) {
    table += fmt::format("{:>10}  {}\n", "", row.peer_refusal);
  }
  PACELINE_RETURN_IF_ERROR(cli::show(table));
  if (options_.json.empty()) return Status::ok();
  auto lines = line(row, row.ours, false) + "\n";
  if (row.peer) lines += line(row, *row.peer, true) + "\n";
  std::ofstream file(options_.json, std::ios::app);
  file << lines << std::flush;
  if (!file) {
    return {Code::kResourceExhausted, cli::unwritable("--json " + options_.json, errno, "file")};
  }
  return Status::ok();
}

}  // namespace paceline::bench
