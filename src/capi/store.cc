#include "capi/store.h"

#include <fmt/format.h>

#include <vector>

namespace paceline::capi {
namespace {

class CallbackStore final : public bootstrap::KeyValue {
 public:
  explicit CallbackStore(const paceline_store& store) : store_(store) {}

  Status put(const std::string& key, const std::string& value) override {
    if (store_.put(store_.context, key.c_str(), value.data(), value.size()) != 0)
      return {Code::kUnavailable,
              fmt::format("the store handed to paceline_comm_create failed to put '{}'", key)};
    return Status::ok();
  }

  Result<std::optional<std::string>> get(const std::string& key) override {
    std::vector<char> value(4096);
    for (;;) {
      long n = store_.get(store_.context, key.c_str(), value.data(), value.size());
      if (n == -1) return std::optional<std::string>();
      if (n < 0 || n > (1L << 24)) {
        return Status(
            Code::kUnavailable,
            fmt::format("the store handed to paceline_comm_create failed to get '{}'", key));
      }
      auto bytes = static_cast<std::size_t>(n);
      if (bytes <= value.size())
        return std::optional<std::string>(std::string(value.data(), bytes));
      value.resize(bytes);
    }
  }

  Status poll(Time) override { return Status::ok(); }
  [[nodiscard]] std::string describe() const override { return "the caller's store"; }
  // It is the job's own store (torchrun's, say): whoever can read it is in the job already, so where
  // nobody set a secret, rank 0's travels by it. It protects as far as that store's port is
  // protected; PACELINE_SECRET protects further.
  [[nodiscard]] bool is_private() const override { return true; }
  [[nodiscard]] bool outlives_ranks() const override { return true; }

 private:
  paceline_store store_;
};

}  // namespace

std::shared_ptr<bootstrap::KeyValue> wrap_store(const paceline_store& store) {
  return std::make_shared<CallbackStore>(store);
}

}  // namespace paceline::capi
