#include "bootstrap/pmi1.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

namespace paceline::bootstrap {
namespace {

constexpr Time kAnswer = kSecond;  // whether a name is there, which is asked when time is over

Status broken(std::string_view why) {
  return {Code::kUnavailable, fmt::format("MPICH's process manager (PMI_FD): {}", why)};
}

/// A length limit as the process manager states it.
Result<std::size_t> limit(const std::map<std::string, std::string>& words, const char* name) {
  auto found = words.find(name);
  std::size_t value = 0;
  if (found != words.end()) {
    const auto& text = found->second;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) value = 0;
  }
  if (value < 16 || value > (1U << 20)) return broken(fmt::format("no usable {}", name));
  return value;
}

/// Of the name service. Slurm's has no rc.
bool is_success(const std::map<std::string, std::string>& words) {
  if (const auto rc = words.find("rc"); rc != words.end()) return rc->second == "0";
  const auto info = words.find("info");
  return info != words.end() && info->second == "ok";
}

}  // namespace

Result<std::map<std::string, std::string>> parse_pmi_line(std::string_view line) {
  std::map<std::string, std::string> words;
  auto corrupted = [](const char* why) {
    return Status(Code::kCorrupted, fmt::format("a PMI line {}", why));
  };
  while (!line.empty()) {
    auto space = line.find(' ');
    auto word = line.substr(0, space);
    line.remove_prefix(space == std::string_view::npos ? line.size() : space + 1);
    if (word.empty()) continue;
    auto equals = word.find('=');
    if (equals == std::string_view::npos) {
      // "msg=" is free text: its further words have no name.
      if (words.contains("msg")) continue;
      return corrupted("has a word without '='");
    }
    auto added = words.emplace(word.substr(0, equals), word.substr(equals + 1)).second;
    if (!added) return corrupted("has a word twice");
  }
  if (!words.contains("cmd")) return corrupted("has no cmd");
  return words;
}

Result<Pmi1Client> Pmi1Client::open(int fd, Time patience) {
  Pmi1Client client(fd, patience);
  PACELINE_ASSIGN(auto hello,
                  client.ask("cmd=init pmi_version=1 pmi_subversion=1\n", "response_to_init"));
  if (hello["rc"] != "0") return broken("refuses PMI version 1");
  PACELINE_ASSIGN(auto maxes, client.ask("cmd=get_maxes\n", "maxes"));
  PACELINE_ASSIGN(client.key_limit_, limit(maxes, "keylen_max"));
  PACELINE_ASSIGN(client.value_limit_, limit(maxes, "vallen_max"));
  PACELINE_ASSIGN(auto space, client.ask("cmd=get_my_kvsname\n", "my_kvsname"));
  client.space_ = space["kvsname"];
  if (client.space_.empty()) return broken("gives no key-value space");
  return client;
}

Status Pmi1Client::say(const std::string& line) {
  std::string_view rest = line;
  while (!rest.empty()) {
    auto n = ::write(fd_, rest.data(), rest.size());
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) return broken(std::strerror(errno));
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
  return {};
}

Result<Pmi1Client::Words> Pmi1Client::hear(int wait_ms) {
  while (true) {
    auto end = buffer_.find('\n');
    if (end == 0) {  // some end a line twice
      buffer_.erase(0, 1);
      continue;
    }
    if (end != std::string::npos) {
      auto words = parse_pmi_line(std::string_view(buffer_).substr(0, end));
      buffer_.erase(0, end + 1);
      return words;
    }
    if (buffer_.size() > kPmiLineLimit) return broken("an endless line");
    pollfd waiting{fd_, POLLIN, 0};
    int ready = ::poll(&waiting, 1, wait_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) return Words();
    char bytes[1024];
    auto n = ::read(fd_, bytes, sizeof(bytes));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) return broken(n == 0 ? "is gone" : std::strerror(errno));
    buffer_.append(bytes, static_cast<std::size_t>(n));
  }
}

Result<Pmi1Client::Words> Pmi1Client::ask(const std::string& line, const std::string& expected) {
  return ask(line, expected, patience_);
}

Result<Pmi1Client::Words> Pmi1Client::ask(const std::string& line, const std::string& expected,
                                          Time patience) {
  PACELINE_RETURN_IF_ERROR(silent_);
  PACELINE_RETURN_IF_ERROR(say(line));
  const int patience_ms = static_cast<int>(patience / kMillisecond);
  PACELINE_ASSIGN(auto words, hear(patience_ms));
  if (in_barrier_ && words["cmd"] == "barrier_out") {  // it ended before the question was heard
    in_barrier_ = false;
    PACELINE_ASSIGN(words, hear(patience_ms));
  }
  if (words.empty()) {
    silent_ = broken(fmt::format("does not answer (expected {})", expected));
    return silent_;
  }
  if (words["cmd"] != expected) {
    return broken(
        fmt::format("answers '{}' where '{}' was due (does the script use MPI beside Paceline?)",
                    words["cmd"], expected));
  }
  return words;
}

Status Pmi1Client::put(const std::string& key, const std::string& value) {
  if (key.size() >= key_limit_ || value.size() >= value_limit_) {
    return {Code::kInternal,
            fmt::format("PMI key '{}' or its value of {} bytes is too long", key, value.size())};
  }
  PACELINE_ASSIGN(
      auto words,
      ask(fmt::format("cmd=put kvsname={} key={} value={}\n", space_, key, value), "put_result"));
  if (words["rc"] != "0")
    return broken(fmt::format("refuses the key '{}' ({})", key, words["msg"]));
  return {};
}

Result<std::string> Pmi1Client::get(const std::string& key) {
  PACELINE_ASSIGN(auto words,
                  ask(fmt::format("cmd=get kvsname={} key={}\n", space_, key), "get_result"));
  if (words["rc"] != "0") return broken(fmt::format("has no key '{}'", key));
  return words["value"];
}

Status Pmi1Client::publish(const std::string& name) {
  PACELINE_ASSIGN(auto words, ask(fmt::format("cmd=publish_name service={} port=here\n", name),
                                  "publish_result"));
  if (!is_success(words)) return broken(fmt::format("refuses the name '{}'", name));
  return {};
}

Result<bool> Pmi1Client::is_published(const std::string& name) {
  PACELINE_ASSIGN(auto words, ask(fmt::format("cmd=lookup_name service={}\n", name),
                                  "lookup_result", std::min(patience_, kAnswer)));
  return is_success(words);
}

Status Pmi1Client::enter_barrier() {
  PACELINE_RETURN_IF_ERROR(say("cmd=barrier_in\n"));
  in_barrier_ = true;
  return {};
}

Result<bool> Pmi1Client::left_barrier() {
  if (!in_barrier_) return true;
  PACELINE_ASSIGN(auto words, hear(0));
  if (words.empty()) return false;
  if (words["cmd"] != "barrier_out")
    return broken(fmt::format("answers '{}' to a barrier", words["cmd"]));
  in_barrier_ = false;
  return true;
}

Status Pmi1Client::finalize() {
  PACELINE_ASSIGN(auto words, ask("cmd=finalize\n", "finalize_ack"));
  return {};
}

}  // namespace paceline::bootstrap
