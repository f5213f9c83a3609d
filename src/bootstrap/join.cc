#include "bootstrap/join.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/hmac.h"
#include "base/version.h"
#include "bootstrap/agreement.h"
#include "bootstrap/arrivals.h"
#include "bootstrap/channels.h"
#include "bootstrap/join_machine.h"
#include "bootstrap/kv_mpi.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/starts.h"
#include "wire/address.h"
#include "wire/frame.h"
#include "wire/tcp/socket.h"

namespace paceline::bootstrap {
namespace {

constexpr double kLongestTimeout = 1e9;  // seconds; sums of several still fit
constexpr Time kLongestSleep = 10 * kMillisecond;
constexpr int kAnswerMs = 1000;                // of a rank that is called, wherever it is
constexpr Time kAnswers = 300 * kMillisecond;  // of a space that is asked who is there

/// A name of at most `limit` characters, another for each text: torch's groups have all their ranks in their names.
std::string short_name(const std::string& text, std::size_t limit) {
  constexpr std::size_t kDigits = 24;
  if (text.size() <= limit) return text;
  const std::string_view salt = "paceline name";
  auto mac = hmac_sha256_plain(std::as_bytes(std::span(salt)), std::as_bytes(std::span(text)));
  std::string_view bytes(reinterpret_cast<const char*>(mac.data()), kDigits / 2);
  return text.substr(0, limit - kDigits - 1) + "~" + to_hex(bytes);
}

/// How often join() was called for a prefix: ranks count alike, also several of one process, so that a communicator that is
/// made again after its end meets none of its predecessor's keys.
int count_joins(const JoinOptions& options) {
  static std::mutex mutex;
  static auto* counts = new std::map<std::pair<std::string, std::optional<Rank>>, int>;
  std::lock_guard lock(mutex);
  return (*counts)[{options.prefix, options.rank}]++;
}

class Joining {
 public:
  Joining(const JoinOptions& options, int incarnation)
      : options_(options), incarnation_(incarnation) {}
  Result<std::unique_ptr<Job>> run();

 private:
  Result<std::unique_ptr<Job>> join_newest_start();
  Result<std::unique_ptr<Job>> join_once();
  [[nodiscard]] bool is_final(const Status& failure) const;
  bool is_started_again(Starts& starts, const Status& failure);
  Status agree_on_secret();
  Status who_is_missing(const Status& otherwise);
  Status listen();
  Status meet();
  Status wait(const char* what, const std::function<Result<bool>()>& done);
  void doze(Time until);
  Result<std::unique_ptr<Job>> finish(Topology topology);

  const JoinOptions& options_;
  int incarnation_;
  SteadyClock clock_;
  Identity identity_;
  Rendezvous rendezvous_;
  std::string prefix_;
  Time timeout_ = 0;
  Time deadline_ = kNever;
  std::optional<Channels> channels_;
  wire::Events early_;
  Topology topology_;
  std::string contradicted_by_;  ///< see JoinMachine
  bool is_hearsay_ = false;      ///< see JoinMachine
};

Member self_of(const Settings& settings, Rank rank, std::string address) {
  Member self;
  self.rank = rank;
  self.host = host_name();
  self.node_id = settings.text("node_id").empty() ? node_identity() : settings.text("node_id");
  self.node_id = short_name(self.node_id, kMaxNodeId);
  self.pid = ::getpid();
  self.address = std::move(address);
  return self;
}

/// Sleeps until the channel has something, or the time comes.
void Joining::doze(Time until) {
  Time left = std::clamp<Time>(until - clock_.now(), 0, kLongestSleep);
  if (channels_ && !channels_->tcp().prepare_wait()) return;
  pollfd waiting{channels_ ? channels_->tcp().poll_fd() : -1, POLLIN, 0};
  timespec time{0, left};
  ::ppoll(&waiting, 1, &time, nullptr);
}

Status Joining::wait(const char* what, const std::function<Result<bool>()>& done) {
  Time pause = kMillisecond / 4;
  while (true) {
    PACELINE_RETURN_IF_ERROR(rendezvous_.space->poll(clock_.now()));
    PACELINE_ASSIGN(bool is_done, done());
    if (is_done) return {};
    if (clock_.now() >= deadline_) {
      return {Code::kTimeout, fmt::format("rank {}: after {:g} s {} ({})", identity_.rank,
                                          static_cast<double>(timeout_) / kSecond, what,
                                          rendezvous_.space->describe())};
    }
    doze(after(clock_.now(), pause));
    pause = std::min(2 * pause, kLongestSleep);
  }
}

Status Joining::agree_on_secret() {
  if (rendezvous_.secret) return {};
  auto& space = *rendezvous_.space;
  if (!space.is_private()) {
    return {Code::kInvalidArgument,
            fmt::format("the job has no secret and {} is readable by others: set PACELINE_SECRET",
                        space.describe())};
  }
  auto key = prefix_ + "secret";
  if (identity_.rank == 0) PACELINE_RETURN_IF_ERROR(space.put(key, make_secret()));
  PACELINE_RETURN_IF_ERROR(space.put(here_key(prefix_, identity_.rank), "here"));
  PACELINE_RETURN_IF_ERROR(space.fence());
  auto status = wait("rank 0 has not come: its secret is missing", [&]() -> Result<bool> {
    PACELINE_ASSIGN(auto text, space.get(key));
    if (!text) return false;
    auto bytes = std::as_bytes(std::span(*text));
    rendezvous_.secret = Secret{SecretSource::kLauncherSpace, {bytes.begin(), bytes.end()}};
    return true;
  });
  if (status.code() == Code::kUnavailable) {
    return {status.code(), fmt::format("rank {} waited for rank 0, and {}: has the process that "
                                       "serves it ended? See what it printed "
                                       "(torch's store lives in rank 0)",
                                       identity_.rank, status.message())};
  }
  return status.code() == Code::kTimeout ? who_is_missing(status) : status;
}

/// Rank 0 may be there, and be kept from joining by whoever is not.
Status Joining::who_is_missing(const Status& otherwise) {
  auto& space = *rendezvous_.space;
  const bool tells = space.announced(here_key(prefix_, identity_.rank)).has_value();
  std::set<Rank> unseen;
  for (Rank r = 0; r < identity_.size; ++r) unseen.insert(r);
  unseen.erase(identity_.rank);
  const Time ends = after(clock_.now(), kAnswers);
  while (true) {
    for (auto rank = unseen.begin(); rank != unseen.end();) {
      const bool here = is_here(space, prefix_, *rank, here_key(prefix_, *rank));
      rank = here ? unseen.erase(rank) : std::next(rank);
    }
    if (unseen.empty()) return tells ? came_late(timeout_, identity_.size) : otherwise;
    if (clock_.now() >= ends) break;
    doze(after(clock_.now(), kLongestSleep));
    [[maybe_unused]] auto polled = space.poll(clock_.now());
  }
  const bool others = !tells && unseen.size() > 1 && unseen.erase(0) > 0;
  auto missing = never_came(timeout_, unseen, identity_.size, space);
  if (!others) return missing;
  return {missing.code(),
          missing.message() +
              ". Rank 0 has not joined either, but it may wait for the same: torch's "
              "rendezvous keeps it until all are there"};
}

Status Joining::listen() {
  const auto& settings = *options_.settings;
  wire::TcpOptions tcp;
  tcp.rank = identity_.rank;
  tcp.size = identity_.size;
  tcp.host = host_name();
  tcp.secret = rendezvous_.secret->bytes;
  tcp.job_id = short_name(prefix_, 128);
  tcp.build = kVersion;
  tcp.bind_address = rendezvous_.bind_address;
  tcp.flows = static_cast<int>(settings.integer("flows"));
  const auto& zero_copy = settings.text("zero_copy");
  tcp.zero_copy = zero_copy == "auto" ? wire::ZeroCopy::kOtherMachines
                  : zero_copy == "1"  ? wire::ZeroCopy::kEverybody
                                      : wire::ZeroCopy::kNobody;
  tcp.machine = machine_identity();
  tcp.protocol.payload_sum = settings.text("checksum") == "on";
  tcp.protocol.peer_timeout = to_time(std::min(settings.number("peer_timeout"), kLongestTimeout));
  PACELINE_ASSIGN(channels_, Channels::open(settings, tcp));
  return {};
}

Status Joining::meet() {
  const auto& settings = *options_.settings;
  JoinSpec spec;
  spec.rank = identity_.rank;
  spec.size = identity_.size;
  spec.self = self_of(settings, identity_.rank, channels_->address());
  spec.prefix = prefix_;
  spec.build = kVersion;
  spec.wire_version = wire::kWireVersion;
  spec.settings = agreed_settings(settings);
  spec.deadline = deadline_;
  spec.timeout = timeout_;
  JoinMachine machine(std::move(spec), *rendezvous_.space, channels_->tcp(),
                      [&](Rank rank, const std::string& address, const std::string& host) {
                        return channels_->tcp().set_peer(rank, address, host);
                      });
  while (!machine.progress(clock_.now())) {
    doze(machine.next_timer());
  }
  contradicted_by_ = machine.contradicted_by();
  is_hearsay_ = machine.is_hearsay();
  PACELINE_RETURN_IF_ERROR(machine.status());
  topology_ = machine.take_topology();
  early_ = machine.take_early();
  return {};
}

Result<std::unique_ptr<Job>> Joining::finish(Topology topology) {
  auto job = std::make_unique<Job>();
  job->topology = std::move(topology);
  job->tree = tree_neighbours(identity_.rank, identity_.size);
  job->launcher = launcher_name(identity_.launcher);
  job->id = prefix_;
  job->allocator = channels_->allocator();
  PACELINE_ASSIGN(job->channel, std::move(*channels_).route(job->topology, std::move(early_)));
  return job;
}

Result<std::unique_ptr<Job>> Joining::run() {
  const auto& settings = *options_.settings;
  PACELINE_ASSIGN(identity_,
                  find_identity(options_.rank, options_.size, settings.flag("use_ddp_launcher")));
  double seconds = options_.timeout_s > 0 ? options_.timeout_s : settings.number("start_timeout");
  timeout_ = to_time(std::min(seconds, kLongestTimeout));
  deadline_ = after(clock_.now(), timeout_);
  prefix_ = fmt::format("paceline/{}/{}/{}/", short_name(identity_.job, 64),
                        short_name(options_.prefix, 64), incarnation_);
  PACELINE_ASSIGN(rendezvous_, find_rendezvous(options_, identity_));
  return identity_.size > 1 && rendezvous_.space->outlives_ranks() ? join_newest_start()
                                                                   : join_once();
}

/// What a start before this one has left in the space leads nowhere: whoever followed it tries again with the newer one.
Result<std::unique_ptr<Job>> Joining::join_newest_start() {
  Starts starts(rendezvous_.space, prefix_);
  if (identity_.rank == 0) {
    PACELINE_RETURN_IF_ERROR(starts.begin());
    prefix_ = starts.prefix();
    return join_once();
  }
  [[maybe_unused]] auto found = starts.find_newest();  // a store that is gone is said below
  rendezvous_.space = starts.watched();
  const auto given = rendezvous_.secret;
  while (true) {
    prefix_ = starts.prefix();
    auto job = join_once();
    if (job) return job;
    channels_.reset();
    if (!is_started_again(starts, job.status())) return job;
    early_ = {};
    rendezvous_.secret = given;
  }
}

/// Whether somebody takes connections at a rank's address: its process lives.
bool answers(const std::string& address) {
  const auto at = wire::parse_endpoint(wire::address_field(address, "tcp").value_or(""));
  if (!at) return false;
  const auto connecting = wire::start_connect(*at, {});
  if (!connecting) return false;
  pollfd waiting{connecting->get(), POLLOUT, 0};
  int error = 0;
  socklen_t length = sizeof error;
  return ::poll(&waiting, 1, kAnswerMs) == 1 &&
         ::getsockopt(waiting.fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

/// What a living rank says, as of another secret or setting, is final; so is what one that lives has put down, as its
/// size. A job that is started again may have another, and what ended a start before it may still stand in the space.
bool Joining::is_final(const Status& failure) const {
  if (is_hearsay_) return false;
  return failure.code() == Code::kUnauthenticated || failure.code() == Code::kInvalidArgument ||
         (failure.code() == Code::kMismatch &&
          (contradicted_by_.empty() || answers(contradicted_by_)));
}

/// Where rank 0 made this start before this process began and nobody answers any more, its successor may be on its way.
bool Joining::is_started_again(Starts& starts, const Status& failure) {
  const bool may_be_over = starts.is_older_than_this_process() && !is_final(failure);
  while (true) {
    auto newer = starts.find_newest();
    if (!newer) return false;
    if (*newer) return true;
    if (!may_be_over || clock_.now() >= deadline_) return false;
    doze(after(clock_.now(), kLongestSleep));
  }
}

Result<std::unique_ptr<Job>> Joining::join_once() {
  const auto& settings = *options_.settings;
  contradicted_by_.clear();
  is_hearsay_ = false;
  if (identity_.size > 1) {
    rendezvous_.space->announce(here_key(prefix_, identity_.rank));
    PACELINE_RETURN_IF_ERROR(agree_on_secret());
  }
  PACELINE_RETURN_IF_ERROR(listen());
  if (identity_.size > 1) {
    PACELINE_RETURN_IF_ERROR(meet());
    return finish(std::move(topology_));
  }
  Topology alone;
  alone.members.push_back(self_of(settings, 0, channels_->address()));
  number_nodes(alone);
  return finish(std::move(alone));
}

}  // namespace

Result<std::unique_ptr<Job>> join(const JoinOptions& options) {
  return Joining(options, count_joins(options)).run();
}

Result<std::unique_ptr<Job>> join_as(const JoinOptions& options, int incarnation) {
  return Joining(options, incarnation).run();
}

}  // namespace paceline::bootstrap
