#include "bootstrap/kv_mpi.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#include "base/hmac.h"
#include "bootstrap/pmi1.h"

namespace paceline::bootstrap {
namespace {

/// PMI keys are short and hold no spaces: a digest of ours stands for it.
std::string short_key(const std::string& key) {
  auto mac = hmac_sha256_plain({}, std::as_bytes(std::span(key)));
  return "pcl-" + to_hex({reinterpret_cast<const char*>(mac.data()), 12});
}

/// What ranks announce in a launcher's name service, for as long as that answers.
template <class Client>
class Names {
 public:
  void add(Client& client, const std::string& name) {
    answers_ = client.publish(short_key(name)).is_ok();
  }
  std::optional<bool> find(Client& client, const std::string& name) {
    if (!answers_) return std::nullopt;
    auto found = client.is_published(short_key(name));
    answers_ = found.is_ok();
    return answers_ ? std::optional(*found) : std::nullopt;
  }
  /// While ranks wait in a fence of `space`.
  [[nodiscard]] Status trouble(const std::string& space) const {
    if (answers_) return {};
    return {
        Code::kUnavailable,
        fmt::format("{} shows nothing until all have come, and its name service does not answer",
                    space)};
  }

 private:
  bool answers_ = false;
};

class Pmi1KeyValue final : public KeyValue {
 public:
  explicit Pmi1KeyValue(Pmi1Client client) : client_(std::move(client)) {}
  ~Pmi1KeyValue() override {
    // A forked child ends too: the conversation is its parent's.
    if (::getpid() != pid_ || client_.in_barrier()) return;
    [[maybe_unused]] auto ended = client_.finalize();
  }

  Status put(const std::string& key, const std::string& value) override {
    auto digits = to_hex(value);
    auto part_bytes = client_.value_limit() - 8;
    auto parts = digits.size() / part_bytes + 1;
    for (std::size_t i = 0; i < parts; ++i) {
      auto part = digits.substr(i * part_bytes, part_bytes);
      if (i == 0) part.insert(0, fmt::format("{:04x}", parts));
      PACELINE_RETURN_IF_ERROR(client_.put(fmt::format("{}-{}", short_key(key), i), part));
    }
    return {};
  }

  Status fence() override { return client_.enter_barrier(); }

  void announce(const std::string& name) override { names_.add(client_, name); }
  std::optional<bool> announced(const std::string& name) override {
    return names_.find(client_, name);
  }
  [[nodiscard]] Status trouble() const override {
    return client_.in_barrier() ? names_.trouble(describe()) : Status();
  }

  Result<std::optional<std::string>> get(const std::string& key) override {
    if (!fenced_.is_ok()) return fenced_;
    if (client_.in_barrier()) return std::optional<std::string>();
    auto first = client_.get(short_key(key) + "-0");
    if (!first)
      return std::optional<std::string>();  // Hydra says the same for "not there" and "never"
    std::size_t parts = 0;
    auto [end, error] = std::from_chars(
        first->data(), first->data() + std::min<std::size_t>(4, first->size()), parts, 16);
    if (error != std::errc() || first->size() < 4 || parts < 1 || parts > 64) {
      return Status(Code::kCorrupted, "a value in MPICH's key-value space is not ours");
    }
    auto digits = first->substr(4);
    for (std::size_t i = 1; i < parts; ++i) {
      PACELINE_ASSIGN(auto part, client_.get(fmt::format("{}-{}", short_key(key), i)));
      digits += part;
    }
    PACELINE_ASSIGN(auto value, from_hex(digits));
    return std::optional<std::string>(std::move(value));
  }

  Status poll(Time) override {
    auto left = client_.left_barrier();
    fenced_ = left.status();
    return fenced_;
  }
  [[nodiscard]] std::string describe() const override { return "MPICH's PMI-1"; }
  [[nodiscard]] bool is_private() const override { return true; }

 private:
  Pmi1Client client_;
  pid_t pid_ = ::getpid();
  Status fenced_;
  Names<Pmi1Client> names_;
};

/// PMIx asks by the rank that put a key; bootstrap's keys tell: ".../r12" and ".../here12" are rank 12's, the rest
/// rank 0's.
std::optional<uint32_t> owner(const std::string& key) {
  auto name = key.substr(key.rfind('/') + 1);
  if (name == "failed") return std::nullopt;  // anyone may put it: PMIx has no such thing
  uint32_t rank = 0;
  for (const std::string_view kind : {"r", "here"}) {
    if (name.starts_with(kind))
      std::from_chars(name.data() + kind.size(), name.data() + name.size(), rank);
  }
  return rank;
}

class PmixKeyValue final : public KeyValue {
 public:
  explicit PmixKeyValue(std::shared_ptr<drivers::PmixClient> client) : client_(std::move(client)) {}

  Status put(const std::string& key, const std::string& value) override {
    if (!owner(key)) return {};
    return client_->put(short_key(key), to_hex(value));
  }

  /// PMIx's fence blocks for as long as a rank is missing: it runs aside, so that our deadline holds.
  Status fence() override {
    PACELINE_RETURN_IF_ERROR(client_->commit());
    fence_ = std::make_shared<Fence>();
    std::thread([fence = fence_, client = client_] {
      fence->status = client->fence();
      fence->done.store(true, std::memory_order_release);
    }).detach();
    return {};
  }

  void announce(const std::string& name) override { names_.add(*client_, name); }
  std::optional<bool> announced(const std::string& name) override {
    return names_.find(*client_, name);
  }
  [[nodiscard]] Status trouble() const override {
    return is_fencing() ? names_.trouble(describe()) : Status();
  }

  Result<std::optional<std::string>> get(const std::string& key) override {
    if (is_fencing()) return std::optional<std::string>();
    auto rank = owner(key);
    if (!rank) return std::optional<std::string>();
    PACELINE_ASSIGN(auto digits, client_->get(*rank, short_key(key)));
    if (!digits) return std::optional<std::string>();
    PACELINE_ASSIGN(auto value, from_hex(*digits));
    return std::optional<std::string>(std::move(value));
  }

  Status poll(Time) override {
    if (fence_ && fence_->done.load(std::memory_order_acquire)) return fence_->status;
    return {};
  }
  [[nodiscard]] std::string describe() const override { return "PMIx"; }
  [[nodiscard]] bool is_private() const override { return true; }

 private:
  [[nodiscard]] bool is_fencing() const {
    return fence_ && !fence_->done.load(std::memory_order_acquire);
  }
  struct Fence {
    std::atomic<bool> done{false};
    Status status;
  };
  std::shared_ptr<drivers::PmixClient> client_;
  std::shared_ptr<Fence> fence_;
  Names<drivers::PmixClient> names_;
};

}  // namespace

std::string to_hex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (unsigned char b : bytes) {
    text += kDigits[b >> 4];
    text += kDigits[b & 15];
  }
  return text;
}

Result<std::string> from_hex(std::string_view digits) {
  auto value = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  std::string bytes;
  bool whole = digits.size() % 2 == 0 && digits.size() <= 2 * kValueLimit;
  for (std::size_t i = 0; whole && i < digits.size(); i += 2) {
    int high = value(digits[i]);
    int low = value(digits[i + 1]);
    whole = high >= 0 && low >= 0;
    bytes += static_cast<char>(high * 16 + low);
  }
  if (!whole)
    return Status(Code::kCorrupted, "a value in the launcher's key-value space is not ours");
  return bytes;
}

Result<std::shared_ptr<KeyValue>> pmi1_space(int fd) {
  PACELINE_ASSIGN(auto client, Pmi1Client::open(fd));
  return std::shared_ptr<KeyValue>(std::make_shared<Pmi1KeyValue>(std::move(client)));
}

Result<std::shared_ptr<KeyValue>> hydra_space() {
  static std::mutex mutex;
  static std::shared_ptr<KeyValue> space;  // destroyed, and so finalized, at exit
  std::lock_guard lock(mutex);
  if (space) return space;
  const char* text = std::getenv("PMI_FD");
  int fd = -1;
  if (text != nullptr) std::from_chars(text, text + std::char_traits<char>::length(text), fd);
  if (fd < 0)
    return Status(Code::kUnavailable,
                  "PMI_FD is not set: this process was not started by MPICH's mpirun");
  PACELINE_ASSIGN(space, pmi1_space(fd));
  return space;
}

std::shared_ptr<KeyValue> pmix_space(std::shared_ptr<drivers::PmixClient> client) {
  return std::make_shared<PmixKeyValue>(std::move(client));
}

Result<std::shared_ptr<KeyValue>> pmix_space() {
  static std::mutex mutex;
  static std::shared_ptr<KeyValue> space;
  std::lock_guard lock(mutex);
  if (space) return space;
  PACELINE_ASSIGN(auto client, drivers::open_pmix());
  space = pmix_space(std::move(client));
  return space;
}

}  // namespace paceline::bootstrap
