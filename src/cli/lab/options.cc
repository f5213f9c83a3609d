#include "cli/lab/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <utility>

#include "cli/text/checks.h"
#include "cli/text/units.h"

namespace paceline::lab {
namespace {

// Providers state line rate and the cap of one flow; latency and loss differ by placement and are
// left to flags.
constexpr Profile kProfiles[] = {
    {"aws-10g", 10e9, 5e9, 9001,
     "EC2, 10 Gb/s, flows between machines outside of a placement group"},
    {"aws-25g", 25e9, 5e9, 9001,
     "EC2, 25 Gb/s, flows between machines outside of a placement group"},
    {"aws-25g-cluster", 25e9, 10e9, 9001, "EC2, 25 Gb/s, in a cluster placement group"},
    {"aws-100g-cluster", 100e9, 10e9, 9001, "EC2, 100 Gb/s, in a cluster placement group"},
    {"gcp-32g", 32e9, 10e9, 1460, "Compute Engine, 32 Gb/s, default network"},
    {"gcp-50g", 50e9, 10e9, 1460, "Compute Engine, 50 Gb/s (Tier_1), default network"},
    {"azure-16g", 16e9, 0, 1500,
     "Azure, 16 Gb/s, accelerated networking, no documented cap of a flow"},
    {"azure-30g", 30e9, 0, 1500,
     "Azure, 30 Gb/s, accelerated networking, no documented cap of a flow"},
    {"ethernet-1g", 1e9, 0, 1500, "a plain switch, 1 Gb/s"},
    {"ethernet-10g", 10e9, 0, 1500, "a plain switch, 10 Gb/s"},
    {"ethernet-25g", 25e9, 0, 1500, "a plain switch, 25 Gb/s"},
};

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

}  // namespace

std::span<const Profile> profiles() { return kProfiles; }

std::string profiles_table() {
  auto out = fmt::format("{:<18} {:>9} {:>9} {:>6}  {}\n", "profile", "rate", "per flow", "MTU",
                         "stands for");
  for (const auto& p : kProfiles) {
    out += fmt::format("{:<18} {:>9} {:>9} {:>6}  {}\n", p.name, cli::format_rate(p.rate_bps),
                       p.per_flow_bps > 0 ? cli::format_rate(p.per_flow_bps) : "-", p.mtu, p.text);
  }
  return out +
         "What this machine can hold is measured: each run calibrates its links and says where "
         "they fall short;\n"
         "--scale 0.1 divides a profile's rates by ten.\n";
}

void Flags::declare(CLI::App& app) {
  app_ = &app;
  auto& o = options_;
  app.add_option("--nodes", o.nodes, "nodes (network namespaces); 2")->check(CLI::Range(1, 64));
  app.add_option("--slots", o.slots, "ranks on each node; 1")->check(CLI::Range(1, 64));
  app.add_option("--rate", rate_, "each node's link, both directions: 1gbit (default)");
  app.add_option("--per-flow", per_flow_, "cap of one TCP or UDP flow: 300mbit");
  app.add_option("--delay", delay_, "added one way between two nodes: 100us");
  app.add_option("--loss", loss_, "packets lost on the way between two nodes: 0.1%");
  app.add_option("--profile", o.profile, "a cloud's link; --profiles lists them");
  app.add_option("--scale", o.scale, "multiply the profile's rates, to fit this machine")
      ->check(cli::number_from(1e-4, 10));
  app.add_option("--mtu", o.mtu, "of the links; 1500")->check(CLI::Range(576, 65535));
  app.add_option("--congestion", o.congestion, "TCP congestion control inside the lab; cubic");
  app.add_option("--json", o.json, "write the report to this file");
  app.add_option("--grace", grace_, "from the first failing rank to SIGTERM for the others; 5s");
  app.add_flag("--keep", o.keep, "leave the namespaces behind, for a look with `ip netns exec`");
  app.add_flag("--quiet", o.quiet, "the command's output and errors only");
  app.add_flag("--no-calibration", no_calibration_,
               "skip measuring the links (figures then stand on trust)");
  app.add_flag("--loopback", o.loopback, "plain processes on loopback: no namespaces, no shaping");
  app.add_flag("--profiles", list_profiles_, "list the profiles");
  app.add_flag("--remove-kept", remove_kept_, "remove what --keep left behind");
}

Status Flags::apply_profile() {
  auto& o = options_;
  for (const auto& p : kProfiles) {
    if (p.name != o.profile) continue;
    if (app_->count("--rate") == 0) o.rate_bps = p.rate_bps * o.scale;
    if (app_->count("--per-flow") == 0) o.per_flow_bps = p.per_flow_bps * o.scale;
    if (app_->count("--mtu") == 0) o.mtu = p.mtu;
    return Status::ok();
  }
  std::string known;
  for (const auto& p : kProfiles) known += fmt::format("{}{}", known.empty() ? "" : ", ", p.name);
  return invalid(fmt::format("--profile '{}' is not known; there are {}", o.profile, known));
}

namespace {

template <class Parser, class Store>
Status apply(const CLI::App& app, const char* flag, const std::string& text, Parser parse,
             Store store) {
  if (app.count(flag) == 0) return Status::ok();
  auto value = parse(text);
  if (!value.is_ok()) return invalid(fmt::format("{}: {}", flag, value.status().message()));
  store(std::move(value).value());
  return Status::ok();
}

}  // namespace

/// A link that was asked for and is not there would lend its name to figures of loopback.
Status Flags::check_loopback() const {
  if (!options_.loopback) return Status::ok();
  std::string asked;
  for (const char* flag : {"--rate", "--per-flow", "--delay", "--loss", "--profile", "--scale",
                           "--mtu", "--congestion", "--keep"}) {
    if (app_->count(flag) > 0) asked += fmt::format("{}{}", asked.empty() ? "" : ", ", flag);
  }
  if (asked.empty()) return Status::ok();
  return invalid(
      fmt::format("--loopback makes neither links nor namespaces: it can't go with {}. Leave "
                  "--loopback out for "
                  "links as asked for, or the other out for plain processes",
                  asked));
}

Status Flags::check() const {
  const auto& o = options_;
  PACELINE_RETURN_IF_ERROR(check_loopback());
  if (o.rate_bps < 1e6 || o.rate_bps > 400e9) {
    return invalid(
        fmt::format("--rate {} is outside of 1mbit to 400gbit", cli::format_rate(o.rate_bps)));
  }
  if (o.per_flow_bps != 0 && o.per_flow_bps < 1e5) {
    return invalid("--per-flow must be at least 100kbit");
  }
  if (o.per_flow_bps > o.rate_bps) {
    if (app_->count("--per-flow") > 0)
      return invalid("--per-flow is above --rate: it caps nothing");
    return invalid(fmt::format(
        "--profile {} caps one flow at {}, which is above --rate: give --per-flow too, or scale "
        "the profile's rates with --scale instead of --rate",
        o.profile, cli::format_rate(o.per_flow_bps)));
  }
  if (o.loss < 0 || o.loss > 0.5) return invalid("--loss must be between 0% and 50%");
  if (o.delay.count() < 0 || o.delay > std::chrono::seconds(1)) {
    return invalid("--delay must be between 0 and 1s");
  }
  if (o.grace.count() < 0) return invalid("--grace can't be negative");
  if (app_->count("--scale") > 0 && o.profile.empty()) {
    return invalid("--scale goes with --profile; without one give --rate");
  }
  if (o.keep && o.delay.count() > 0) {
    return invalid(
        "--keep can't go with --delay: the delayed links are carried by the lab and end with it. "
        "Keep "
        "a lab without --delay, or let the command itself wait (… -- sleep 1000) and look "
        "meanwhile");
  }
  if (app_->count("--json") > 0 && o.json.empty()) return invalid("--json needs a file's name");
  if (o.command.empty()) {
    return invalid("no command; put it after --: paceline lab --nodes 4 -- python train.py");
  }
  return Status::ok();
}

Result<Options> Flags::resolve(const std::vector<std::string>& command) {
  auto& o = options_;
  o.command = command;
  o.calibrate = !no_calibration_;
  if (app_->count("--profile") > 0) PACELINE_RETURN_IF_ERROR(apply_profile());
  PACELINE_RETURN_IF_ERROR(
      apply(*app_, "--rate", rate_, cli::parse_rate, [&](double bps) { o.rate_bps = bps; }));
  PACELINE_RETURN_IF_ERROR(apply(*app_, "--per-flow", per_flow_, cli::parse_rate,
                                 [&](double bps) { o.per_flow_bps = bps; }));
  PACELINE_RETURN_IF_ERROR(
      apply(*app_, "--loss", loss_, cli::parse_share, [&](double share) { o.loss = share; }));
  PACELINE_RETURN_IF_ERROR(apply(*app_, "--delay", delay_, cli::parse_duration,
                                 [&](std::chrono::nanoseconds d) { o.delay = d; }));
  PACELINE_RETURN_IF_ERROR(
      apply(*app_, "--grace", grace_, cli::parse_duration, [&](std::chrono::nanoseconds d) {
        o.grace = std::chrono::duration_cast<std::chrono::milliseconds>(d);
      }));
  PACELINE_RETURN_IF_ERROR(check());
  return o;
}

}  // namespace paceline::lab
