// Tells ranks what their links have carried, while they run: each connection to a Unix socket gets
// one JSON object (traffic_json) and is closed. The socket's path is in PACELINE_LAB_BYTES;
// `paceline lab-bytes` reads it.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

#include "base/status.h"
#include "cli/lab/counters.h"

namespace paceline::lab {

class ByteServer {
 public:
  /// `counters` must outlive the server and is used under lock() by others meanwhile.
  static Result<std::unique_ptr<ByteServer>> start(Counters& counters, const std::string& path);
  ~ByteServer();
  /// The counters now; thread-safe.
  Result<std::vector<LinkTraffic>> read();

 private:
  ByteServer(Counters& counters, int listener, int wake)
      : counters_(counters), listener_(listener), wake_(wake) {}
  void serve();
  Counters& counters_;
  std::mutex mutex_;
  int listener_;
  int wake_;
  std::thread thread_;
};

/// Asks a ByteServer; kUnavailable when there is none.
Result<std::string> ask_bytes(const std::string& path);

}  // namespace paceline::lab
