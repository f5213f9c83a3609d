// The key-value server's states: frames of several clients, before and after they have proven themselves, cut anywhere.
// No client hears what it has not asked for, or anything before its proof; nothing grows beyond its bound; the same bytes
// cut otherwise bring the same.
//
// Input: eight bytes of cuts, then what happens: one byte (client, kind, whether it is delivered at once), and what that
// kind takes. Every second client begins with its proof.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/testing/fuzz_input.h"
#include "bootstrap/kv_space.h"

namespace {

using namespace paceline;             // NOLINT: a fuzzer has no headers to leak into
using namespace paceline::bootstrap;  // NOLINT
using paceline::testing::FuzzInput;
using paceline::testing::require;

constexpr KvSpace::Limits kLimits{.memory = 20'000, .unread = 2'000, .awaited = 5};
constexpr int kClients = 4;

/// The space, its clients as they should be, and all that they were told.
class Play {
 public:
  Play(std::span<const uint8_t> input, std::span<const uint8_t> cuts) : in_{input}, cuts_(cuts) {}

  std::vector<std::string> run() {
    while (!in_.rest.empty()) {
      const uint8_t what = in_.byte();
      act(what % kClients, what / kClients);
      check_bounds();
    }
    for (auto& [id, client] : clients_) hear(id);
    return std::move(story_);
  }

 private:
  struct Client {
    Nonce challenge{};
    Nonce nonce{};
    bool is_challenged = false, is_welcome = false;
    std::set<std::string> asked;
    std::vector<std::byte> says;      ///< not delivered yet
    std::vector<std::byte> unparsed;  ///< delivered, and no whole frame yet
    std::vector<std::byte> hears;
  };

  void act(int id, int what) {
    if (!clients_.contains(id)) {
      Client& client = clients_[id];
      client.challenge.fill(std::byte{++nonces_});
      client.nonce.fill(std::byte{++nonces_});
      space_.enter(id, client.challenge);
      if (id % 2 == 1) say_proof(client, 0);
    }
    Client& client = clients_[id];
    switch (what % 8) {
      case 0: {
        const std::size_t n = std::min<std::size_t>(in_.byte() % 64, in_.rest.size());
        const auto raw = std::as_bytes(in_.rest.first(n));
        client.says.insert(client.says.end(), raw.begin(), raw.end());
        in_.rest = in_.rest.subspan(n);
        break;
      }
      case 1:
        say_proof(client, in_.byte());
        break;
      case 2: {
        const uint8_t size = in_.byte();
        append_frame(
            {.kind = FrameKind::kPut,
             .key = key(),
             .value = std::string(size < 128 ? size : (size - 127U) * 32, 'a' + size % 26)},
            client.says);
        break;
      }
      case 3:
      case 4: {
        const int times = what % 8 == 4 ? in_.byte() : 1;
        const std::string asked = key();
        for (int i = 0; i < times; ++i)
          append_frame({.kind = FrameKind::kGet, .key = asked}, client.says);
        break;
      }
      case 5:
        append_frame({.kind = static_cast<FrameKind>(1 + in_.byte() % 7)}, client.says);
        break;
      case 6:
        return hear(id);
      default:
        return leave(id);
    }
    if (what / 8 % 4 != 3) deliver(id);
  }

  std::string key() { return std::string(1 + in_.byte() % 6, 'k'); }

  void say_proof(Client& client, int how) const {
    Nonce challenge = client.challenge;
    if (how % 4 == 1) challenge[0] ^= std::byte{1};  // another connection's
    KvFrame proof{.kind = FrameKind::kProof,
                  .nonce = client.nonce,
                  .mac = client_proof(secret_, challenge, client.nonce)};
    if (how % 4 == 2) proof.nonce[0] ^= std::byte{1};
    if (how % 4 == 3) proof.mac[31] ^= std::byte{1};
    append_frame(proof, client.says);
  }

  void deliver(int id) {
    Client& client = clients_[id];
    expect(client);
    std::span<const std::byte> rest = client.says;
    while (!rest.empty()) {
      const std::size_t n =
          std::min<std::size_t>(1U + cuts_[turn_++ % cuts_.size()] * 64U, rest.size());
      const Status status = space_.take(id, rest.first(n));
      check_bounds();
      rest = rest.subspan(n);
      if (!status.is_ok()) {
        require(!status.message().empty());
        story_.push_back("refused " + status.message());
        leave(id);
        return;
      }
    }
    client.says.clear();
  }

  /// By the frames themselves: what this client may hear, and what keys may hold.
  void expect(Client& client) {
    client.unparsed.insert(client.unparsed.end(), client.says.begin(), client.says.end());
    while (true) {
      const auto frame = take_frame(client.unparsed);
      if (!frame || !*frame) return;
      if ((*frame)->kind == FrameKind::kGet) client.asked.insert((*frame)->key);
      if ((*frame)->kind == FrameKind::kPut) values_[(*frame)->key].insert((*frame)->value);
    }
  }

  void hear(int id) {
    Client& client = clients_[id];
    auto& out = space_.output(id);
    client.hears.insert(client.hears.end(), out.begin(), out.end());
    out.clear();
    while (true) {
      const auto frame = take_frame(client.hears);
      require(frame.is_ok());
      if (!*frame) break;
      heard(client, **frame);
    }
    require(client.hears.empty());
    require(client.is_welcome == space_.is_proven(id));
  }

  void heard(Client& client, const KvFrame& frame) {
    story_.push_back(std::to_string(static_cast<int>(frame.kind)) + " " + frame.key + " " +
                     frame.value);
    if (!client.is_challenged) {
      require(frame.kind == FrameKind::kChallenge && frame.nonce == client.challenge);
      client.is_challenged = true;
    } else if (!client.is_welcome) {
      require(frame.kind == FrameKind::kWelcome &&
              frame.mac == server_proof(secret_, client.challenge, client.nonce));
      client.is_welcome = true;
    } else {
      require(frame.kind == FrameKind::kValue && client.asked.contains(frame.key));
      require(values_[frame.key].contains(frame.value));
      // A key is written once.
      require(known_.try_emplace(frame.key, frame.value).first->second == frame.value);
    }
  }

  void leave(int id) {
    hear(id);
    space_.leave(id);
    clients_.erase(id);
    story_.push_back("left");
  }

  void check_bounds() {
    for (const int id : space_.told()) require(clients_.contains(id));
    for (auto& [id, client] : clients_) {
      require(space_.output(id).size() <= kLimits.unread + 4 + kFrameLimit);
    }
  }

  FuzzInput in_;
  std::span<const uint8_t> cuts_;
  std::size_t turn_ = 0;
  uint8_t nonces_ = 0;
  const std::vector<std::byte> secret_ = std::vector<std::byte>(16, std::byte{0x5C});
  KvSpace space_{secret_, kLimits};
  std::map<int, Client> clients_;
  std::map<std::string, std::set<std::string>> values_;
  std::map<std::string, std::string> known_;
  std::vector<std::string> story_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  constexpr std::size_t kCuts = 8;
  if (size < kCuts) return 0;
  const std::span input(data, size);
  const uint8_t whole[] = {255};
  require(Play(input.subspan(kCuts), input.first(kCuts)).run() ==
          Play(input.subspan(kCuts), whole).run());
  return 0;
}
