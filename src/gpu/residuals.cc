#include "gpu/residuals.h"

#include <fmt/format.h>

#include <algorithm>

#include "drivers/cuda/loader.h"

namespace paceline::gpu {
namespace {

// Positions in a plane are multiples of this: 64 bytes.
constexpr uint64_t kGranule = 16;

uint64_t round_up(uint64_t elements) { return (elements + kGranule - 1) / kGranule * kGranule; }

/// Stretches of elements that aren't zero. Shorter gaps belong to them: zero is also what has been sent.
std::vector<ResidualRange> runs_of(uint64_t key, std::span<const float> data) {
  constexpr uint64_t kGap = 4096;
  std::vector<ResidualRange> runs;
  for (uint64_t i = 0; i < data.size(); ++i) {
    if (data[i] == 0) continue;
    const uint64_t end = runs.empty() ? 0 : runs.back().offset + runs.back().elements;
    if (runs.empty() || i - end >= kGap)
      runs.push_back({key, i, 1});
    else
      runs.back().elements = i + 1 - runs.back().offset;
  }
  return runs;
}

}  // namespace

Status Residuals::use(const Memory& memory) {
  const Memory old = memory_;
  for (int kind = 0; kind < 2; ++kind) {
    const auto& from = kind == 0 ? old.residual : old.velocity;
    const auto& to = kind == 0 ? memory.residual : memory.velocity;
    if (to[0] == 0) continue;
    for (size_t p = 0; p < 2; ++p) {
      if (used(static_cast<int>(p)) > memory.elements)
        return {Code::kInvalidArgument, "residuals can't move to less memory than they have"};
      if (used(static_cast<int>(p)) == 0) continue;
      const uint64_t bytes = used(static_cast<int>(p)) * sizeof(float);
      if (from[p] != 0)
        PACELINE_CUDA_CALL(api_, memcpy_dtod_async, to[p], from[p], bytes, stream_);
      else
        PACELINE_CUDA_CALL(api_, memset_d8_async, to[p], 0, bytes, stream_);
    }
  }
  memory_ = memory;
  return Status::ok();
}

/// Appends to `out` what `layout` holds of the range, and to `missing` what it does not; `out` gets a plane of -1 for
/// those.
void Residuals::find(const Layout& layout, int plane, const ResidualRange& range,
                     std::vector<Found>& out, std::vector<ResidualRange>& missing) {
  uint64_t at = range.offset;
  const uint64_t end = range.offset + range.elements;
  const auto gap = [&](uint64_t until) {
    if (until <= at) return;
    missing.push_back({range.key, at, until - at});
    out.push_back({until - at, -1, 0});
    at = until;
  };
  const auto found = layout.find(range.key);
  if (found != layout.end()) {
    const auto& entries = found->second;
    auto it = entries.upper_bound(at);
    if (it != entries.begin()) --it;
    for (; it != entries.end() && it->first < end && at < end; ++it) {
      const uint64_t last = it->first + it->second.elements;
      if (last <= at) continue;
      gap(std::max(at, it->first));
      const uint64_t n = std::min(last, end) - at;
      out.push_back({n, plane, it->second.position + (at - it->first)});
      at += n;
    }
  }
  gap(end);
}

/// This step's values first, then the committed ones.
void Residuals::look_up(std::span<const ResidualRange> ranges, std::vector<Found>& out) const {
  std::vector<Found> step;
  std::vector<ResidualRange> missing;
  std::vector<ResidualRange> never;
  for (const auto& range : ranges) {
    step.clear();
    missing.clear();
    find(latest_, 1 - now_, range, step, missing);
    size_t next = 0;
    for (const auto& f : step) {
      if (f.plane >= 0) {
        out.push_back(f);
      } else {
        find(committed_, now_, missing[next++], out, never);
      }
    }
  }
}

void Residuals::remove(Layout& layout, const ResidualRange& range) {
  auto found = layout.find(range.key);
  if (found == layout.end()) return;
  auto& entries = found->second;
  const uint64_t end = range.offset + range.elements;
  auto it = entries.upper_bound(range.offset);
  if (it != entries.begin()) --it;
  while (it != entries.end() && it->first < end) {
    const uint64_t first = it->first;
    const Entry e = it->second;
    const uint64_t last = first + e.elements;
    if (last <= range.offset) {
      ++it;
      continue;
    }
    it = entries.erase(it);
    if (first < range.offset) entries[first] = {range.offset - first, e.position};
    if (last > end)
      it = entries.insert_or_assign(end, Entry{last - end, e.position + end - first}).first;
  }
}

void Residuals::insert(Layout& layout, std::span<const ResidualRange> ranges, uint64_t position) {
  for (const auto& r : ranges) {
    if (r.elements == 0) continue;
    remove(layout, r);
    layout[r.key][r.offset] = {r.elements, position};
    position += r.elements;
  }
}

/// The smallest gap that fits, else the end.
Result<uint64_t> Residuals::take(int plane, uint64_t elements) {
  const uint64_t rounded = round_up(elements);
  auto& runs = runs_[static_cast<size_t>(plane)];
  uint64_t position = used(plane), least = UINT64_MAX, end = 0;
  for (const auto& [begin, last] : runs) {
    if (begin - end >= rounded && begin - end < least) {
      position = end;
      least = begin - end;
    }
    end = last;
  }
  if (position + rounded > memory_.elements)
    return Status(Code::kResourceExhausted,
                  fmt::format("the residuals' memory holds {} elements, this rank's shards of one "
                              "step's gradients; {} more are asked for: reserve() the gradients "
                              "of all models of this process group before their first step",
                              memory_.elements, position + rounded - memory_.elements));
  if (rounded > 0) runs[position] = position + rounded;
  return position;
}

/// f(entry) for all that lies in a plane.
template <class F>
void Residuals::for_entries_in(int plane, F f) {
  const auto all = [&](Layout& layout) {
    for (auto& [key, entries] : layout)
      for (auto& [offset, e] : entries) f(e);
  };
  if (plane == now_) {
    all(committed_);
    all(released_);
  } else {
    all(latest_);
  }
}

/// Gives back what nobody refers to any more, also of what was handed out as one: for steps that end amid those of others,
/// and shards that change their owner.
void Residuals::collect(int plane) {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for_entries_in(plane, [&](const Entry& e) {
    all.emplace_back(e.position / kGranule * kGranule, round_up(e.position + e.elements));
  });
  std::sort(all.begin(), all.end());
  auto& runs = runs_[static_cast<size_t>(plane)];
  runs.clear();
  for (const auto& [begin, end] : all) {
    if (!runs.empty() && begin <= runs.rbegin()->second)
      runs.rbegin()->second = std::max(runs.rbegin()->second, end);
    else
      runs.emplace(begin, end);
  }
}

/// Moves what is in use to the plane's beginning, in the order of the stream, so that its gaps are one.
Status Residuals::compact(int plane, drivers::cuda::Stream stream) {
  // A run that moves by less than its length is copied by as many pieces: where they would be too many it stays.
  constexpr uint64_t kPieces = 512;
  collect(plane);
  auto& runs = runs_[static_cast<size_t>(plane)];
  std::map<uint64_t, uint64_t> moved, moves;  // the new runs; by how much that of this beginning
  uint64_t to = 0;
  for (const auto& [begin, end] : runs) {
    const uint64_t elements = end - begin;
    const uint64_t by = (begin - to) * kPieces < elements ? 0 : begin - to;
    for (uint64_t at = begin; by > 0 && at < end; at += by)
      PACELINE_RETURN_IF_ERROR(copy(at - by, {std::min(by, end - at), plane, at}, plane, stream));
    moves[begin] = by;
    to = end - by;
    moved[begin - by] = to;
  }
  for_entries_in(plane,
                 [&](Entry& e) { e.position -= std::prev(moves.upper_bound(e.position))->second; });
  runs = std::move(moved);
  return Status::ok();
}

/// As take(); where there are only gaps that are too small, they are made one.
Result<uint64_t> Residuals::take_tidily(int plane, uint64_t elements,
                                        drivers::cuda::Stream stream) {
  auto taken = take(plane, elements);
  if (taken || taken.status().code() != Code::kResourceExhausted) return taken;
  PACELINE_RETURN_IF_ERROR(compact(plane, stream));
  return take(plane, elements);
}

Status Residuals::copy(uint64_t to, const Found& from, int to_plane, drivers::cuda::Stream stream) {
  const auto target = static_cast<size_t>(to_plane);
  for (const auto& planes : {memory_.residual, memory_.velocity}) {
    if (planes[0] == 0) continue;
    const auto at = address(planes[target], to);
    if (from.plane < 0)
      PACELINE_CUDA_CALL(api_, memset_d8_async, at, 0, from.elements * sizeof(float), stream);
    else
      PACELINE_CUDA_CALL(api_, memcpy_dtod_async, at,
                         address(planes[static_cast<size_t>(from.plane)], from.position),
                         from.elements * sizeof(float), stream);
  }
  return Status::ok();
}

Result<Residuals::Place> Residuals::place(std::span<const ResidualRange> ranges,
                                          drivers::cuda::Stream stream) {
  std::vector<Found> found;
  look_up(ranges, found);
  uint64_t elements = 0;
  bool together = !found.empty();
  for (const auto& f : found) {
    together = together && f.plane == found[0].plane && f.plane >= 0 &&
               f.position == found[0].position + elements;
    elements += f.elements;
  }
  const int next = 1 - now_;
  const auto at = [&](const auto& planes, int plane, uint64_t position) {
    return planes[0] == 0 ? 0 : address(planes[static_cast<size_t>(plane)], position);
  };
  Place p;
  if (together && found[0].plane == next && found[0].position % kGranule == 0) {  // twice in a step
    p.before = p.after = at(memory_.residual, next, found[0].position);
    p.velocity_before = p.velocity_after = at(memory_.velocity, next, found[0].position);
    return p;
  }
  auto taken = take(next, elements);
  // Of sums the lanes read and write on streams of their own: what others have written must stay where it is.
  if (!taken && taken.status().code() == Code::kResourceExhausted && stream == stream_) {
    PACELINE_RETURN_IF_ERROR(compact(next, stream));
    found.clear();
    look_up(ranges, found);
    taken = take(next, elements);
  }
  PACELINE_ASSIGN(const auto position, taken);
  p.after = at(memory_.residual, next, position);
  p.velocity_after = at(memory_.velocity, next, position);
  if (together && found[0].position % kGranule == 0) {
    p.before = at(memory_.residual, now_, found[0].position);
    p.velocity_before = at(memory_.velocity, now_, found[0].position);
  } else {
    uint64_t to = position;
    for (const auto& f : found) {
      PACELINE_RETURN_IF_ERROR(copy(to, f, next, stream));
      to += f.elements;
    }
    p.before = p.after;
    p.velocity_before = p.velocity_after;
  }
  insert(latest_, ranges, position);
  return p;
}

void Residuals::release(std::span<const ResidualRange> ranges, std::vector<Parting>& out) {
  uint64_t begin = 0;
  for (const auto& range : ranges) {
    std::vector<Found> found;
    std::vector<ResidualRange> none;
    find(committed_, now_, range, found, none);
    uint64_t at = 0;
    for (const auto& f : found) {
      if (f.plane >= 0) {
        const ResidualRange gone{range.key, range.offset + at, f.elements};
        out.push_back({begin + at, f.elements,
                       address(memory_.residual[static_cast<size_t>(now_)], f.position)});
        remove(committed_, gone);
        insert(released_, {&gone, 1}, f.position);
      }
      at += f.elements;
    }
    begin += range.elements;
  }
}

/// What the step has written of these parameters, as it lies in the plane: buckets are copied as a whole.
std::vector<Residuals::Written> Residuals::written(std::span<const uint64_t> keys) const {
  std::vector<Written> all;
  for (const uint64_t key : keys) {
    const auto latest = latest_.find(key);
    if (latest == latest_.end()) continue;
    for (const auto& [offset, e] : latest->second)
      all.push_back({{key, offset, e.elements}, e.position});
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.position < b.position; });
  return all;
}

/// Gives these ranges places among the committed values where they have none.
Status Residuals::make_room(std::span<const Written> ranges) {
  std::vector<ResidualRange> together;
  uint64_t elements = 0, end = 0;
  const auto flush = [&]() -> Status {
    if (together.empty()) return Status::ok();
    PACELINE_ASSIGN(const uint64_t position, take_tidily(now_, elements, stream_));
    insert(committed_, together, position);
    together.clear();
    elements = 0;
    return Status::ok();
  };
  std::vector<Found> found;
  std::vector<ResidualRange> missing;
  for (const auto& [range, position] : ranges) {
    missing.clear();
    find(committed_, now_, range, found, missing);
    for (const auto& gap : missing) {
      const uint64_t begin = position + (gap.offset - range.offset);
      if (begin != end) PACELINE_RETURN_IF_ERROR(flush());
      together.push_back(gap);
      elements += gap.elements;
      end = begin + gap.elements;
    }
  }
  return flush();
}

Status Residuals::commit(std::span<const uint64_t> keys) {
  for (const uint64_t key : keys) released_.erase(key);
  collect(now_);
  const auto ranges = written(keys);
  PACELINE_RETURN_IF_ERROR(make_room(ranges));
  Found from{0, 1 - now_, 0};
  uint64_t to = 0;
  std::vector<Found> found;
  std::vector<ResidualRange> missing;
  for (const auto& [range, position] : ranges) {
    found.clear();
    find(committed_, now_, range, found, missing);
    uint64_t at = position;
    for (const auto& f : found) {
      if (at != from.position + from.elements || f.position != to + from.elements) {
        if (from.elements > 0) PACELINE_RETURN_IF_ERROR(copy(to, from, now_, stream_));
        from = {0, 1 - now_, at};
        to = f.position;
      }
      from.elements += f.elements;
      at += f.elements;
    }
  }
  if (from.elements > 0) PACELINE_RETURN_IF_ERROR(copy(to, from, now_, stream_));
  forget_written(keys);
  return Status::ok();
}

void Residuals::forget_written(std::span<const uint64_t> keys) {
  for (const uint64_t key : keys) latest_.erase(key);
  collect(1 - now_);
}

Status Residuals::rollback(std::span<const uint64_t> keys) {
  for (const uint64_t key : keys) {
    const auto released = released_.find(key);
    if (released == released_.end()) continue;
    take_back(key, released->second);
    released_.erase(released);
  }
  forget_written(keys);
  return Status::ok();
}

void Residuals::take_back(uint64_t key, const Entries& released) {
  for (const auto& [offset, e] : released) {
    const ResidualRange range{key, offset, e.elements};
    insert(committed_, {&range, 1}, e.position);
  }
}

Status Residuals::commit() {
  released_.clear();
  if (latest_.empty()) return Status::ok();
  // What this step did not touch is kept.
  std::vector<Found> in_latest;
  std::vector<ResidualRange> missing;
  for (const auto& [key, entries] : committed_) {
    for (const auto& [offset, e] : entries)
      find(latest_, 1 - now_, {key, offset, e.elements}, in_latest, missing);
  }
  for (const auto& range : missing) {
    std::vector<Found> found;
    std::vector<ResidualRange> none;
    find(committed_, now_, range, found, none);
    PACELINE_ASSIGN(uint64_t position, take_tidily(1 - now_, range.elements, stream_));
    uint64_t to = position;
    for (const auto& f : found) {
      PACELINE_RETURN_IF_ERROR(copy(to, f, 1 - now_, stream_));
      to += f.elements;
    }
    insert(latest_, {&range, 1}, position);
  }
  committed_ = std::move(latest_);
  latest_.clear();
  runs_[static_cast<size_t>(now_)].clear();
  now_ = 1 - now_;
  return Status::ok();
}

Status Residuals::rollback() {
  for (const auto& [key, entries] : released_) take_back(key, entries);
  released_.clear();
  latest_.clear();
  runs_[static_cast<size_t>(1 - now_)].clear();
  return Status::ok();
}

std::vector<std::pair<uint64_t, uint64_t>> Residuals::committed_runs(
    std::span<const uint64_t> keys) const {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const uint64_t key : keys) {
    const auto found = committed_.find(key);
    if (found == committed_.end()) continue;
    for (const auto& [offset, e] : found->second) all.emplace_back(e.position, e.elements);
  }
  std::sort(all.begin(), all.end());
  std::vector<std::pair<uint64_t, uint64_t>> runs;
  for (const auto& [position, elements] : all) {
    if (!runs.empty() && runs.back().first + runs.back().second == position)
      runs.back().second += elements;
    else
      runs.emplace_back(position, elements);
  }
  return runs;
}

Status Residuals::add_to(uint64_t key, std::span<float> data, Kind kind) {
  const auto found = committed_.find(key);
  if (found == committed_.end()) return Status::ok();
  std::vector<float> values;
  for (const auto& [offset, e] : found->second) {
    if (offset + e.elements > data.size())
      return {
          Code::kInvalidArgument,
          fmt::format("the residual of parameter {} has elements up to {}, the buffer for it {}: "
                      "its shape changed",
                      key, offset + e.elements, data.size())};
    values.resize(e.elements);
    PACELINE_CUDA_CALL(api_, memcpy_dtoh_async, values.data(), address(plane_of(kind), e.position),
                       e.elements * sizeof(float), stream_);
    PACELINE_CUDA_CALL(api_, stream_synchronize, stream_);
    for (uint64_t i = 0; i < e.elements; ++i) data[offset + i] += values[i];
  }
  return Status::ok();
}

Status Residuals::write(uint64_t key, std::span<const float> data, Kind kind) {
  if (latest_.contains(key))
    return {Code::kInvalidArgument,
            fmt::format("the residual of parameter {} can't be set between an all-reduce and the "
                        "step's commit or rollback",
                        key)};
  if (data.empty()) {
    forget(key);
    return Status::ok();
  }
  const auto known = committed_.find(key);
  if (known != committed_.end() && !known->second.empty()) {
    const auto& [offset, e] = *known->second.rbegin();
    if (offset + e.elements > data.size())
      return {
          Code::kInvalidArgument,
          fmt::format("the residual of parameter {} has elements up to {}, those to load {}: its "
                      "shape changed",
                      key, offset + e.elements, data.size())};
  }
  std::vector<Found> found;
  std::vector<ResidualRange> missing;
  // Memory is taken for a rank's own shards; what has memory is set.
  for (const auto& run : runs_of(key, data)) find(committed_, now_, run, found, missing);
  for (const auto& range : missing) {
    PACELINE_ASSIGN(uint64_t position, take_tidily(now_, range.elements, stream_));
    for (const auto& planes : {memory_.residual, memory_.velocity}) {
      if (planes[0] != 0)
        PACELINE_CUDA_CALL(api_, memset_d8_async,
                           address(planes[static_cast<size_t>(now_)], position), 0,
                           range.elements * sizeof(float), stream_);
    }
    insert(committed_, {&range, 1}, position);
  }
  for (const auto& [offset, e] : committed_[key])
    PACELINE_CUDA_CALL(api_, memcpy_htod_async, address(plane_of(kind), e.position),
                       data.data() + offset, e.elements * sizeof(float), stream_);
  PACELINE_CUDA_CALL(api_, stream_synchronize, stream_);
  return Status::ok();
}

void Residuals::forget(uint64_t key) { committed_.erase(key); }

}  // namespace paceline::gpu
