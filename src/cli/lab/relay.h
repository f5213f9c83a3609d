// Delay in user space, for kernels without netem: both ends of a node's link are TAP devices, and a thread carries
// frames between them, those from the node after a fixed time.
//
//   eth0 (TAP, in the node) ──▶ queue, `delay` ──▶ port (TAP, in the switch)
//                           ◀──────────────────────
//
// So every path between two nodes is longer by `delay` each way. Segmentation offload passes through (a frame
// carries its virtio header along), which keeps a 1 Gb/s link at a few thousand reads a second.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace paceline::lab {

struct Node;

/// Owned descriptors of one link's two TAP devices.
struct TapPair {
  int nic = -1;
  int port = -1;
};

/// Makes the two devices, named as the node says. kUnavailable where /dev/net/tun is not there or not ours.
Result<TapPair> make_taps(const Node& node, const std::string& switch_path);

class Relay {
 public:
  /// Takes the descriptors over and starts carrying.
  static Result<std::unique_ptr<Relay>> start(std::vector<TapPair> links,
                                              std::chrono::nanoseconds delay);
  ~Relay();
  /// Frames that wait keep theirs; what comes after them should wait no shorter.
  void change_delay(std::chrono::nanoseconds delay) { delay_ = delay; }

 private:
  Relay(std::vector<TapPair> links, std::chrono::nanoseconds delay, int wake)
      : links_(std::move(links)), delay_(delay), wake_(wake) {}
  void carry();
  std::vector<TapPair> links_;
  std::atomic<std::chrono::nanoseconds> delay_;
  int wake_;
  std::thread thread_;
};

}  // namespace paceline::lab
