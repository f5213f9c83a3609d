#include "bootstrap/secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "base/hmac.h"

namespace paceline::bootstrap {
namespace {

constexpr std::size_t kShortest = 16;
constexpr std::size_t kLongest = 4096;

/// A fixed-length key from whatever text the source gave, another for each use of that text.
std::vector<std::byte> derive(std::string_view text, std::string_view label) {
  auto mac = hmac_sha256(std::as_bytes(std::span(text)), {std::as_bytes(std::span(label))});
  return {mac.begin(), mac.end()};
}

Result<std::string> read_secret_file(const std::string& path) {
  auto invalid = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, fmt::format("PACELINE_SECRET_FILE '{}': {}", path, why));
  };
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return invalid(
        fmt::format("{}. Make it once (openssl rand -hex 32 > '{}'; chmod 600 '{}') and copy it to "
                    "every host, for the user that the ranks run as",
                    std::strerror(errno), path, path));
  }
  struct stat about {};
  ::fstat(fd, &about);
  std::array<char, kLongest> buffer{};
  auto n = ::read(fd, buffer.data(), buffer.size());
  ::close(fd);
  if (n < 0) return invalid(std::strerror(errno));
  if ((about.st_mode & 077) != 0) {
    return invalid(
        fmt::format("others may read it (mode {:o}): chmod 600 '{}'", about.st_mode & 0777, path));
  }
  std::string text(buffer.data(), static_cast<std::size_t>(n));
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  if (text.size() < kShortest) {
    return invalid(
        fmt::format("holds {} characters, at least {} are needed (try: openssl rand -hex 32)",
                    text.size(), kShortest));
  }
  return text;
}

}  // namespace

Result<std::optional<Secret>> find_secret(const Settings& settings, const Identity& identity,
                                          const Environment& get) {
  if (const auto& text = settings.text("secret"); !text.empty()) {
    if (text.size() < kShortest) {
      return Status(
          Code::kInvalidArgument,
          fmt::format(
              "PACELINE_SECRET has {} characters, at least {} are needed (try: openssl rand "
              "-hex 32)",
              text.size(), kShortest));
    }
    return std::optional(Secret{SecretSource::kSetting, secret_from_text(text)});
  }
  if (const auto& path = settings.text("secret_file"); !path.empty()) {
    PACELINE_ASSIGN(auto text, read_secret_file(path));
    return std::optional(Secret{SecretSource::kFile, secret_from_text(text)});
  }
  if (identity.launcher == Launcher::kOpenMpi) {
    auto key = get("OMPI_MCA_orte_precondition_transports");
    if (key && key->size() >= kShortest) {
      return std::optional(Secret{SecretSource::kOpenMpi, derive(*key, "paceline open mpi")});
    }
  }
  return std::optional<Secret>();
}

Secret local_secret(const Identity& identity) {
  auto text = fmt::format("{} {} {}", node_identity(), ::getuid(), identity.job);
  return {SecretSource::kLocal, derive(text, "paceline local")};
}

std::vector<std::byte> secret_from_text(const std::string& text) {
  return derive(text, "paceline secret");
}

std::string make_secret() {
  std::array<std::byte, 32> bytes;
  random_bytes(bytes);
  std::string text;
  for (auto b : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(b));
  return text;
}

std::string describe_secret(SecretSource source) {
  switch (source) {
    case SecretSource::kSetting:
      return "PACELINE_SECRET (`paceline run` makes one for every job): keeps out everyone who "
             "can't read the environment of your processes (root, and you yourself, can)";
    case SecretSource::kFile:
      return "PACELINE_SECRET_FILE: keeps out everyone who can't read the file; the same for all "
             "jobs that use it, so a rank of one can join another's by mistake unless their ports "
             "differ";
    case SecretSource::kOpenMpi:
      return "Open MPI's transport key, made by mpirun for every job: keeps out everyone who can't "
             "read your processes' environment or mpirun's own traffic";
    case SecretSource::kLauncherSpace:
      return "made by rank 0 and handed over in the launcher's key-value space (MPICH's PMI, PMIx, "
             "torch's store): as private as that space. MPICH's is reached over ssh and pipes "
             "only; torch's store answers everyone who can connect to MASTER_PORT, so on a network "
             "that you share set PACELINE_SECRET";
    case SecretSource::kLocal:
      return "derived from this machine, the user and the job, used only where all ranks listen on "
             "loopback: keeps out other machines and other jobs; another user of this machine "
             "could compute it";
  }
  return "unknown";
}

}  // namespace paceline::bootstrap
