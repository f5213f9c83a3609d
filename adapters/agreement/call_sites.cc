#include "call_sites.h"

#include <fmt/format.h>

#include <algorithm>

namespace paceline::agreement {
namespace {

bool is_counter(std::string_view part) {
  return part.size() > 1 && part[0] == '_' &&
         std::all_of(part.begin() + 1, part.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// FNV-1a: ranks of one job may run on different machines and builds, so std::hash won't do.
uint64_t hash(const std::set<std::string>& paths) {
  uint64_t h = 14695981039346656037U;
  for (const auto& path : paths) {
    for (char c : path) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211U;
    h = (h ^ 0xffU) * 1099511628211U;
  }
  return h;
}

constexpr const char* kAdvice =
    "so nothing tells which one belongs to which of the other ranks: give each a name of its own "
    "(name=; for a function that is called more than once, as an argument of that function)";

}  // namespace

std::string call_path(std::string_view node, std::string_view traced) {
  if (node.ends_with(traced)) node.remove_suffix(traced.size());
  std::string path;
  while (!node.empty()) {
    const auto slash = node.find('/');
    const auto part = node.substr(0, slash);
    if (!part.empty() && !is_counter(part)) {
      if (!path.empty()) path += '/';
      path += part;
    }
    node.remove_prefix(slash == std::string_view::npos ? node.size() : slash + 1);
  }
  return path;
}

void CallSites::add(const CallSite& site) {
  // Without a path the traced function is a graph by itself, where the node stands alone.
  if (site.trace.empty() || site.path.empty()) return;
  std::lock_guard lock(mutex_);
  paths_[{site.trace, site.name}].insert(site.path);
}

CallSites::Run CallSites::begin(CallSite& site, int64_t step, uint64_t frame, int64_t iteration) {
  std::lock_guard lock(mutex_);
  Run run;
  run.name = site.name;
  const bool graph = !site.trace.empty();
  if (graph) {
    const auto& paths = paths_[{site.trace, site.name}];
    if (paths.size() > 1 && !site.path.empty()) {
      run.is_one = false;
      run.name += fmt::format("@{}", site.path);
      run.note = fmt::format(
          ", one of {} calls of its function (graph {:016x}; where ranks build different graphs, "
          "pass each call a name)",
          paths.size(), hash(paths));
    }
    auto& last = last_[run.name];
    if (last.site != nullptr && last.site != &site && last.step == step) {
      run.refusal = fmt::format("all-reduce '{}' is two operations of one step ('{}' and '{}'), {}",
                                run.name, last.path, site.path, kAdvice);
      return run;
    }
    last = {step, &site, site.path};
  }
  if (frame != 0) {
    run.is_one = false;
    run.name += fmt::format("#{}", iteration);
    if (site.step != step) {
      site.step = step;
      site.first_frame = frame;
    } else if (site.first_frame != frame) {
      run.note += fmt::format(", in a loop of the outer iteration {:016x}", frame);
    }
  }
  auto& others = under_way_[run.name];
  const auto self = std::this_thread::get_id();
  if (others.count > 0 && (graph || others.graph || others.thread != self)) {
    run.refusal = fmt::format("all-reduce '{}' was called while one of that name was under way, {}",
                              run.name, kAdvice);
    return run;
  }
  ++others.count;
  others.graph = graph;
  others.thread = self;
  return run;
}

void CallSites::end(const std::string& name) {
  std::lock_guard lock(mutex_);
  auto found = under_way_.find(name);
  if (found != under_way_.end() && --found->second.count == 0) under_way_.erase(found);
}

}  // namespace paceline::agreement
