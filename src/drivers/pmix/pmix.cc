#include "drivers/pmix/pmix.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "drivers/pmix/api.h"

namespace paceline::drivers {
namespace {

using pmix::Info;
using pmix::kGlobal;
using pmix::kNotFound;
using pmix::kString;
using pmix::Proc;
using pmix::PublishedData;
using pmix::Value;
constexpr int kSuccess = 0;

struct Functions {
  int (*init)(Proc*, void*, std::size_t);
  int (*finalize)(const void*, std::size_t);
  int (*put)(uint8_t, const char*, Value*);
  int (*commit)();
  int (*fence)(const Proc*, std::size_t, const void*, std::size_t);
  int (*get)(const Proc*, const char*, const void*, std::size_t, Value**);
  int (*publish)(const Info*, std::size_t);
  int (*lookup)(PublishedData*, std::size_t, const Info*, std::size_t);
  const char* (*error_string)(int);
};

Result<Functions> load() {
  void* library = ::dlopen("libpmix.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status(Code::kUnavailable,
                  fmt::format("libpmix.so.2 can't be loaded ({})", why ? why : "no reason"));
  }
  Functions functions{};
  auto bind = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
  bool all = bind(functions.init, "PMIx_Init") && bind(functions.finalize, "PMIx_Finalize") &&
             bind(functions.put, "PMIx_Put") && bind(functions.commit, "PMIx_Commit") &&
             bind(functions.fence, "PMIx_Fence") && bind(functions.get, "PMIx_Get") &&
             bind(functions.publish, "PMIx_Publish") && bind(functions.lookup, "PMIx_Lookup") &&
             bind(functions.error_string, "PMIx_Error_string");
  if (!all) return Status(Code::kUnavailable, "libpmix.so.2 lacks a function that it should have");
  return functions;
}

class LibraryClient final : public PmixClient {
 public:
  static Result<std::shared_ptr<PmixClient>> open() {
    if (std::getenv("PMIX_NAMESPACE") == nullptr) {
      return Status(Code::kUnavailable,
                    "PMIX_NAMESPACE is not set: no PMIx launcher started this process");
    }
    PACELINE_ASSIGN(auto functions, load());
    auto client = std::make_shared<LibraryClient>();
    client->functions_ = functions;
    int rc = functions.init(&client->self_, nullptr, 0);
    if (rc != kSuccess) {
      return Status(Code::kUnavailable, fmt::format("PMIx_Init: {}", functions.error_string(rc)));
    }
    client->open_ = true;
    return std::shared_ptr<PmixClient>(std::move(client));
  }
  ~LibraryClient() override {
    if (open_ && ::getpid() == pid_) functions_.finalize(nullptr, 0);
  }

  [[nodiscard]] uint32_t rank() const override { return self_.rank; }
  Status put(const std::string& key, const std::string& value) override {
    Value wrapped{};
    wrapped.type = kString;
    wrapped.data.string = const_cast<char*>(value.c_str());  // PMIx_Put copies it
    return check(functions_.put(kGlobal, key.c_str(), &wrapped), "PMIx_Put");
  }
  Status commit() override { return check(functions_.commit(), "PMIx_Commit"); }
  Status fence() override { return check(functions_.fence(nullptr, 0, nullptr, 0), "PMIx_Fence"); }
  Result<std::optional<std::string>> get(uint32_t rank, const std::string& key) override {
    Proc from = self_;
    from.rank = rank;
    Value* value = nullptr;
    int rc = functions_.get(&from, key.c_str(), nullptr, 0, &value);
    if (rc != kSuccess || value == nullptr) return std::optional<std::string>();
    std::optional<std::string> text;
    if (value->type == kString && value->data.string != nullptr) {
      text = value->data.string;
      std::free(value->data.string);
    }
    std::free(value);
    return text;
  }

  Status publish(const std::string& name) override {
    char here[] = "here";
    Info info{};
    PACELINE_RETURN_IF_ERROR(put_name(info.key, name));
    info.value.type = kString;
    info.value.data.string = here;
    return check(functions_.publish(&info, 1), "PMIx_Publish");
  }
  Result<bool> is_published(const std::string& name) override {
    PublishedData found{};
    PACELINE_RETURN_IF_ERROR(put_name(found.key, name));
    const int rc = functions_.lookup(&found, 1, nullptr, 0);
    if (found.value.type == kString) std::free(found.value.data.string);
    if (rc == kNotFound) return false;
    PACELINE_RETURN_IF_ERROR(check(rc, "PMIx_Lookup"));
    return true;
  }

 private:
  template <std::size_t Size>
  static Status put_name(char (&key)[Size], const std::string& name) {
    if (name.size() >= Size)
      return {Code::kInternal, fmt::format("PMIx name '{}' is too long", name)};
    std::memcpy(key, name.c_str(), name.size() + 1);
    return {};
  }
  Status check(int rc, const char* what) const {
    if (rc == kSuccess) return {};
    return {Code::kUnavailable, fmt::format("{}: {}", what, functions_.error_string(rc))};
  }
  Functions functions_{};
  Proc self_{};
  bool open_ = false;
  pid_t pid_ = ::getpid();  ///< a forked child's end is not ours
};

}  // namespace

Result<std::shared_ptr<PmixClient>> open_pmix() { return LibraryClient::open(); }

}  // namespace paceline::drivers
