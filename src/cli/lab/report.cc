#include "cli/lab/report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/file_errors.h"
#include "cli/text/units.h"

namespace paceline::lab {
namespace {

std::string direction(const DirectionCalibration& d, double rate) {
  return fmt::format("{:>11} ({:5.1f} %)  {:>7.0f} kB", cli::format_rate(d.payload_bps),
                     100 * d.payload_bps / rate, d.ahead_bytes / 1e3);
}

nlohmann::json to_json(const DirectionCalibration& d) {
  nlohmann::json j = {{"payload_bps", d.payload_bps},
                      {"ahead_after_idle_bytes", d.ahead_bytes},
                      {"flows", d.flows},
                      {"may_carry_bps", d.may_carry_bps}};
  if (d.one_flow_bps > 0) j["one_flow_bps"] = d.one_flow_bps;
  return j;
}

nlohmann::json to_json(const Traffic& t) {
  return {{"bytes", t.bytes}, {"packets", t.packets}, {"drops", t.drops}};
}

}  // namespace

std::string describe(const Options& o, const std::string& congestion) {
  auto text = fmt::format("{} node{} × {} rank{}, {} both ways, MTU {}, {}", o.nodes,
                          o.nodes == 1 ? "" : "s", o.slots, o.slots == 1 ? "" : "s",
                          cli::format_rate(o.rate_bps), o.mtu, congestion);
  if (o.per_flow_bps > 0)
    text += fmt::format(", a flow at most {}", cli::format_rate(o.per_flow_bps));
  if (o.delay.count() > 0)
    text += fmt::format(", {:.6g} µs more each way", static_cast<double>(o.delay.count()) / 1e3);
  if (o.loss > 0) text += fmt::format(", {:.3g} % lost", o.loss * 100);
  if (!o.profile.empty()) text += fmt::format(" (profile {})", o.profile);
  return text;
}

std::string delay_line(const Options& o, const std::vector<double>& delays) {
  auto [least, most] = std::minmax_element(delays.begin(), delays.end());
  return fmt::format("lab: delay each way: {:.6g} µs asked, {:.0f} to {:.0f} µs measured\n",
                     static_cast<double>(o.delay.count()) / 1e3, *least * 1e6, *most * 1e6);
}

std::string calibration_table(const Options& o, const std::vector<LinkCalibration>& links) {
  auto text = fmt::format("lab: {:<6} {:<21} {:>10}  {:<21} {:>10}\n", "link", "up, TCP payload",
                          "after idle", "down, TCP payload", "after idle");
  bool holds = true;
  for (std::size_t i = 0; i < links.size(); ++i) {
    const auto& l = links[i];
    text += fmt::format("lab: node{:<2} {}  {}\n", i, direction(l.up, o.rate_bps),
                        direction(l.down, o.rate_bps));
    if (l.up.one_flow_bps > 0) {
      text += fmt::format("lab:        one flow up {} ({:.1f} % of its cap)\n",
                          cli::format_rate(l.up.one_flow_bps),
                          100 * l.up.one_flow_bps / o.per_flow_bps);
    }
    if (l.up.may_carry_bps < o.rate_bps) {
      text += fmt::format(
          "lab:        up by {} flows, which may carry {} together ({:.1f} % of it): the rest "
          "of the line is not measured\n",
          l.up.flows, cli::format_rate(l.up.may_carry_bps),
          100 * l.up.payload_bps / l.up.may_carry_bps);
    }
    for (const auto* d : {&l.up, &l.down})
      holds = holds && d->payload_bps >= least_payload(o, d->may_carry_bps);
  }
  if (!holds) {
    text += fmt::format(
        "lab: warning: this machine does not hold {} on every link ({}): compare with the measured "
        "rates, not with the nominal one\n",
        cli::format_rate(o.rate_bps),
        o.loss > 0            ? "loss takes its share"
        : o.delay.count() > 0 ? "TCP takes its time to fill it over such a delay, or cores are busy"
                              : "it has too few free cores");
  }
  return text;
}

std::string traffic_table(const std::vector<LinkTraffic>& used, double seconds) {
  auto text = fmt::format("lab: {:<6} {:>12} {:>12} {:>12} {:>12} {:>8}\n", "link", "up MB", "mean",
                          "down MB", "mean", "dropped");
  for (std::size_t i = 0; i < used.size(); ++i) {
    const auto& l = used[i];
    auto mean = [&](const Traffic& t) {
      return cli::format_rate(static_cast<double>(t.bytes) * 8 / seconds);
    };
    text += fmt::format("lab: node{:<2} {:>12.3f} {:>12} {:>12.3f} {:>12} {:>8}\n", i,
                        static_cast<double>(l.up.bytes) / 1e6, mean(l.up),
                        static_cast<double>(l.down.bytes) / 1e6, mean(l.down),
                        l.up.drops + l.down.drops);
  }
  return text;
}

Status ReportFile::open(const std::string& path) {
  if (path.empty()) return Status::ok();
  int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  const bool is_new = fd >= 0;
  if (fd < 0 && errno == EEXIST) fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return {Code::kInvalidArgument, cli::unwritable("--json " + path, errno, "file")};
  close(fd);
  path_ = path;
  is_new_ = is_new;
  return Status::ok();
}

ReportFile::~ReportFile() {
  if (is_new_) unlink(path_.c_str());
}

Status ReportFile::write(const Report& r) {
  if (path_.empty()) return Status::ok();
  is_new_ = false;
  nlohmann::json j = {{"nodes", r.options.nodes},
                      {"slots", r.options.slots},
                      {"rate_bps", r.options.rate_bps},
                      {"per_flow_bps", r.options.per_flow_bps},
                      {"delay_ns", r.options.delay.count()},
                      {"loss", r.options.loss},
                      {"mtu", r.options.mtu},
                      {"congestion", r.congestion},
                      {"profile", r.options.profile},
                      {"loopback", r.options.loopback},
                      {"command", r.options.command},
                      {"seconds", r.seconds},
                      {"exit_code", r.run.exit_code},
                      {"first_failed_rank", r.run.first_failed}};
  j["ranks"] = nlohmann::json::array();
  for (std::size_t i = 0; i < r.run.ranks.size(); ++i) {
    const auto& rank = r.run.ranks[i];
    j["ranks"].push_back({{"rank", i},
                          {"exit_code", rank.exit_code},
                          {"seconds", rank.seconds},
                          {"cpu_seconds", rank.cpu_seconds},
                          {"max_rss_kb", rank.max_rss_kb}});
  }
  j["links"] = nlohmann::json::array();
  for (std::size_t i = 0; i < r.traffic.size(); ++i) {
    nlohmann::json link = {
        {"node", i}, {"up", to_json(r.traffic[i].up)}, {"down", to_json(r.traffic[i].down)}};
    if (i < r.delays.size()) link["delay_measured_ns"] = std::llround(r.delays[i] * 1e9);
    if (i < r.calibration.size()) {
      link["calibration"] = {{"up", to_json(r.calibration[i].up)},
                             {"down", to_json(r.calibration[i].down)}};
    }
    j["links"].push_back(link);
  }
  std::ofstream file(path_);
  // An argument of the command may be anything, also no UTF-8: it is not worth the report.
  constexpr auto kReplace = nlohmann::json::error_handler_t::replace;
  file << j.dump(2, ' ', false, kReplace) << "\n" << std::flush;
  if (!file) return {Code::kResourceExhausted, cli::unwritable("--json " + path_, errno, "file")};
  return Status::ok();
}

}  // namespace paceline::lab
