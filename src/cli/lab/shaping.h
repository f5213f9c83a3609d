// The traffic control of a lab's links, as text for `tc -batch`: pure, so that it can be read and
// tested.
//
// Each direction of a link ends in one token bucket (tbf) whose bytes are the link's bytes:
//
//   rank → eth0 [tbf → (htb: a class per flow)] → veth → port [bpf: loss] → bridge → port [tbf] →
//   veth → eth0 → rank
//
// Burst: max(72 kB, 80 µs of the line). Larger ones let small messages ride free (256 kB is 2 ms at
// 1 Gb/s); smaller ones drop when several nodes send to one, and a 64 kB GSO batch must fit.
// `overhead 24` is Ethernet's preamble, gap and checksum.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "cli/lab/options.h"

namespace paceline::lab {

inline constexpr int kFlowClasses = 1024;

uint64_t burst_bytes(double rate_bps);
/// The largest batch of segments (GSO) that the devices of nodes and switch make: the kernel's, or less where the burst
/// would have no room beside it for what the line carries in kTimerIsLate. A shaper lets a batch go by a timer, when it has
/// the tokens, and tokens beyond the burst are lost: with batches of 64 KiB and 72 kB of burst, timers that idle virtual
/// processors heed late cost a line of 5 Gb/s a sixth.
uint64_t batch_bytes(double rate_bps);
inline constexpr uint64_t kLargestBatch = 65536;
/// More room would cost more: smaller batches are more work for the processor.
inline constexpr std::chrono::microseconds kTimerIsLate{20};
/// Room of a queue before it drops: 8 ms of the line, at least 512 kB.
uint64_t queue_bytes(double rate_bps);

/// Classic BPF that answers "drop" (as a direct action) for the given share of packets.
std::string loss_bytecode(double share);
/// Classic BPF that answers a flow's class: 20:(2 + hash % kFlowClasses) for IPv4 TCP and UDP, else
/// 20:1.
std::string flow_bytecode();

/// For the node's own end: what it sends.
std::string node_shaping(const Options& options, const std::string& device);
/// For the switch's end: what the node receives; and loss of what it sent.
std::string port_shaping(const Options& options, const std::string& device);
std::string port_loss(const Options& options, const std::string& device);

}  // namespace paceline::lab
