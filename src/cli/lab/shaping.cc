#include "cli/lab/shaping.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace paceline::lab {
namespace {

// Opcodes of classic BPF and its ancillary loads (linux/filter.h).
constexpr uint32_t kLoadWord = 0x20, kLoadHalf = 0x28, kLoadByte = 0x30, kLoadHalfAtX = 0x48;
constexpr uint32_t kLoadXHeaderLength = 0xb1;  // X = 4 × (byte & 15)
constexpr uint32_t kJumpEqual = 0x15, kJumpGreaterEqual = 0x35, kJumpSet = 0x45;
constexpr uint32_t kAnd = 0x54, kAddX = 0x0c, kMultiply = 0x24, kAdd = 0x04, kOr = 0x44,
                   kJumpAlways = 0x05;
constexpr uint32_t kStore = 0x02, kLoadXMemory = 0x61, kReturn = 0x06, kReturnA = 0x16;
constexpr uint32_t kAncillaryRandom = 0xfffff000U + 56;
constexpr uint32_t kActionPass = 0, kActionDrop = 2;

struct Instruction {
  uint32_t code, jump_true, jump_false, k;
};

std::string print(const std::vector<Instruction>& program) {
  auto text = fmt::format("{}", program.size());
  for (const auto& i : program)
    text += fmt::format(",{} {} {} {}", i.code, i.jump_true, i.jump_false, i.k);
  return text;
}

std::string line_shaper(const Options& o, const std::string& device) {
  return fmt::format(
      "qdisc add dev {} root handle 1: tbf rate {:.0f}bit burst {} limit {} overhead 24\n", device,
      o.rate_bps, burst_bytes(o.rate_bps), queue_bytes(o.rate_bps));
}

}  // namespace

uint64_t burst_bytes(double rate_bps) {
  return static_cast<uint64_t>(std::max(72e3, std::round(rate_bps / 8 * 80e-6)));
}

uint64_t batch_bytes(double rate_bps) {
  const double late = rate_bps / 8 * std::chrono::duration<double>(kTimerIsLate).count();
  const double room = static_cast<double>(burst_bytes(rate_bps)) - late;
  return static_cast<uint64_t>(std::min(room, static_cast<double>(kLargestBatch)));
}

uint64_t queue_bytes(double rate_bps) {
  return static_cast<uint64_t>(std::max(512e3, std::round(rate_bps / 8 * 8e-3)));
}

std::string loss_bytecode(double share) {
  auto threshold = static_cast<uint32_t>(std::llround(std::min(share, 0.999999) * 4294967296.0));
  return print({{kLoadWord, 0, 0, kAncillaryRandom},
                {kJumpGreaterEqual, 0, 1, threshold},
                {kReturn, 0, 0, kActionPass},
                {kReturn, 0, 0, kActionDrop}});
}

std::string flow_bytecode() {
  constexpr uint32_t kMajor = 0x20U << 16;
  // Ports add up: flows that a process opens one after the other have neighbouring ports, so
  // neighbouring classes.
  return print({
      {kLoadHalf, 0, 0, 12},           // 0: EtherType
      {kJumpEqual, 0, 18, 0x0800},     // 1: IPv4, or go to 20
      {kLoadByte, 0, 0, 23},           // 2: protocol
      {kJumpEqual, 1, 0, 6},           // 3: TCP, go to 5
      {kJumpEqual, 0, 15, 17},         // 4: UDP, or go to 20
      {kLoadHalf, 0, 0, 20},           // 5: fragment
      {kJumpSet, 13, 0, 0x1fff},       // 6: a later fragment has no ports, go to 20
      {kLoadWord, 0, 0, 30},           // 7: destination address
      {kAnd, 0, 0, 0xff},              // 8
      {kMultiply, 0, 0, 389},          // 9
      {kStore, 0, 0, 0},               // 10
      {kLoadXHeaderLength, 0, 0, 14},  // 11
      {kLoadHalfAtX, 0, 0, 14},        // 12: source port
      {kStore, 0, 0, 1},               // 13
      {kLoadHalfAtX, 0, 0, 16},        // 14: destination port
      {kLoadXMemory, 0, 0, 0},         // 15
      {kAddX, 0, 0, 0},                // 16
      {kLoadXMemory, 0, 0, 1},         // 17
      {kAddX, 0, 0, 0},                // 18
      {kJumpAlways, 0, 0, 1},          // 19: on to 21
      {kReturn, 0, 0, kMajor | 1},     // 20
      {kAnd, 0, 0, kFlowClasses - 1},  // 21
      {kAdd, 0, 0, 2},                 // 22
      {kOr, 0, 0, kMajor},             // 23
      {kReturnA, 0, 0, 0},             // 24
  });
}

std::string node_shaping(const Options& o, const std::string& device) {
  auto text = line_shaper(o, device);
  if (o.per_flow_bps <= 0) return text;
  text += fmt::format("qdisc add dev {} parent 1:1 handle 20: htb default 1\n", device);
  auto add_class = [&](int minor, double rate) {
    text += fmt::format(
        "class add dev {} parent 20: classid 20:{:x} htb rate {:.0f}bit ceil {:.0f}bit burst {} "
        "cburst {} quantum 60000 overhead 24\n",
        device, minor, rate, rate, burst_bytes(rate), burst_bytes(rate));
    text += fmt::format("qdisc add dev {} parent 20:{:x} bfifo limit {}\n", device, minor,
                        queue_bytes(rate));
  };
  add_class(1, o.rate_bps);  // what is no flow: ARP and the like
  for (int i = 0; i < kFlowClasses; ++i) add_class(2 + i, o.per_flow_bps);
  text += fmt::format("filter add dev {} parent 20: protocol all prio 1 bpf bytecode \"{}\"\n",
                      device, flow_bytecode());
  return text;
}

std::string port_shaping(const Options& o, const std::string& device) {
  return line_shaper(o, device);
}

std::string port_loss(const Options& o, const std::string& device) {
  return fmt::format(
      "qdisc add dev {} clsact\n"
      "filter add dev {} ingress protocol all prio 1 bpf da bytecode \"{}\"\n",
      device, device, loss_bytecode(o.loss));
}

}  // namespace paceline::lab
