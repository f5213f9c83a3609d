// A job's key-value space and what its clients say and hear, without sockets: bytes come in, cut
// anywhere, and bytes go out. The server (kv_server.h) carries them.
#pragma once

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bootstrap/kv_frame.h"

namespace paceline::bootstrap {

class KvSpace {
 public:
  struct Limits {
    std::size_t memory = 64 << 20;  ///< bytes of keys and values
    std::size_t unread = 1 << 20;   ///< bytes that wait for a client to read, and one frame more
    std::size_t awaited = 4096;     ///< keys that one client may wait for
  };
  KvSpace(std::vector<std::byte> secret, const Limits& limits)
      : secret_(std::move(secret)), limits_(limits) {}

  /// A client has come: it is challenged. `id` is its owner's number for it, in use once at a time.
  void enter(int id, const Nonce& challenge);
  /// What a client said next. Not ok: it is to be refused. Others may hear of it: told().
  Status take(int id, std::span<const std::byte> bytes);
  void leave(int id);

  /// What a client has yet to be sent; who sends it takes it off.
  [[nodiscard]] std::vector<std::byte>& output(int id) { return clients_.at(id).out; }
  /// Clients whose output has grown by what another said, since the last call.
  std::vector<int> told() { return std::exchange(told_, {}); }
  /// It reads nothing of what it waited for and gets no more of it: time to end it. A client that only stood still comes
  /// back and asks again.
  [[nodiscard]] bool is_deaf(int id) const { return clients_.at(id).is_deaf; }
  [[nodiscard]] bool is_proven(int id) const { return clients_.at(id).is_proven; }
  /// True where the bytes so far end within a frame.
  [[nodiscard]] bool is_within_a_frame(int id) const { return !clients_.at(id).in.empty(); }

 private:
  struct Client {
    bool is_proven = false;
    bool is_deaf = false;
    Nonce challenge{};
    std::vector<std::byte> in;
    std::vector<std::byte> out;
    std::vector<std::string> awaited;
  };
  Status handle(int id, Client& client, const KvFrame& frame);
  Status prove(Client& client, const KvFrame& frame) const;
  Status put(const KvFrame& frame);
  Status get(int id, Client& client, const std::string& key);

  std::vector<std::byte> secret_;
  Limits limits_;
  std::size_t memory_ = 0;
  std::map<int, Client> clients_;
  std::map<std::string, std::string> entries_;
  std::map<std::string, std::vector<int>> waiters_;
  std::vector<int> told_;
};

}  // namespace paceline::bootstrap
