#include "bootstrap/starts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

namespace paceline::bootstrap {
namespace {

constexpr Time kLook = 200 * kMillisecond;  // between two looks for a newer start

int64_t now_us(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000 + now.tv_nsec / 1000;
}

/// 0 where it is none.
int64_t number_of(std::string_view text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

int64_t process_began_us() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // The second field is the program's name in brackets, blanks and all; the start is the 22nd, in ticks since boot.
  auto at = text.rfind(')');
  for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  int64_t ticks = 0;
  if (at == std::string::npos ||
      std::from_chars(text.data() + at + 1, text.data() + text.size(), ticks).ec != std::errc())
    return 0;
  const int64_t age = now_us(CLOCK_BOOTTIME) - ticks * 1'000'000 / ::sysconf(_SC_CLK_TCK);
  return now_us(CLOCK_REALTIME) - age;
}

/// Forwards to the space of all starts.
class Starts::Watched final : public KeyValue {
 public:
  explicit Watched(Starts& starts) : starts_(starts), space_(*starts.space_) {}
  Status put(const std::string& key, const std::string& value) override {
    return space_.put(key, value);
  }
  Status fence() override { return space_.fence(); }
  Result<std::optional<std::string>> get(const std::string& key) override {
    return space_.get(key);
  }
  void announce(const std::string& name) override { space_.announce(name); }
  std::optional<bool> announced(const std::string& name) override { return space_.announced(name); }
  [[nodiscard]] Status trouble() const override { return space_.trouble(); }
  [[nodiscard]] std::string describe() const override { return space_.describe(); }
  [[nodiscard]] bool is_private() const override { return space_.is_private(); }

  Status poll(Time now) override {
    PACELINE_RETURN_IF_ERROR(space_.poll(now));
    if (now < look_at_) return {};
    look_at_ = after(now, kLook);
    PACELINE_ASSIGN(auto newer, space_.get(starts_.key(starts_.number_ + 1)));
    if (!newer) return {};
    return {Code::kAborted, "the job has been started again"};
  }

 private:
  Starts& starts_;
  KeyValue& space_;
  Time look_at_ = 0;
};

Starts::Starts(std::shared_ptr<KeyValue> space, std::string base, int64_t began_us)
    : space_(std::move(space)), base_(std::move(base)), began_us_(began_us) {}

std::string Starts::key(int number) const { return fmt::format("{}start/{}", base_, number); }

std::string Starts::prefix() const { return fmt::format("{}{}/", base_, number_); }

Status Starts::begin() {
  while (true) {
    PACELINE_ASSIGN(auto taken, space_->get(key(number_)));
    if (!taken) break;
    ++number_;
  }
  made_us_ = now_us(CLOCK_REALTIME);
  return space_->put(key(number_), fmt::format("{}", made_us_));
}

Result<bool> Starts::find_newest() {
  bool found = false;
  for (int number = made_us_ == 0 ? 0 : number_ + 1;; ++number) {
    PACELINE_ASSIGN(auto made, space_->get(key(number)));
    if (!made) return found;
    found = found || number > 0;
    number_ = number;
    made_us_ = std::max(number_of(*made), int64_t{1});  // whatever is written there, it is made
  }
}

bool Starts::is_older_than_this_process() const { return made_us_ != 0 && made_us_ < began_us_; }

std::shared_ptr<KeyValue> Starts::watched() { return std::make_shared<Watched>(*this); }

}  // namespace paceline::bootstrap
