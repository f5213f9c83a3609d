// The key-value server under good clients and bad ones, over real sockets.
#include "bootstrap/kv_tcp.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <random>

#include "base/testing/no_descriptors.h"
#include "base/testing/said.h"
#include "bootstrap/kv_server.h"
#include "bootstrap/secret.h"

namespace paceline::bootstrap {
namespace {

using paceline::testing::Said;
using paceline::testing::times;

std::vector<std::byte> secret(const char* text) { return secret_from_text(text); }

class KvTcp : public ::testing::Test {
 protected:
  void SetUp() override {
    KvServerOptions options;
    options.address = "127.0.0.1";
    options.secret = secret("the secret of this job");
    options.stranger_limit = 8;
    options.proof_timeout = 200 * kMillisecond;
    auto started = KvServer::start(options);
    ASSERT_TRUE(started) << started.status().message();
    server = std::move(*started);
  }
  std::unique_ptr<TcpKeyValue> client(const char* text = "the secret of this job") {
    auto opened = TcpKeyValue::open("127.0.0.1", server->port(), secret(text), nullptr);
    EXPECT_TRUE(opened);
    return std::move(opened).value();
  }
  /// Serves everyone until `done`, at most ten seconds.
  bool turn(const std::vector<TcpKeyValue*>& clients, const std::function<bool()>& done) {
    SteadyClock clock;
    Time end = clock.now() + 10 * kSecond;
    while (clock.now() < end) {
      server->serve(clock.now());
      for (auto* c : clients) last = c->poll(clock.now());
      if (done()) return true;
      ::usleep(200);
    }
    return false;
  }
  int raw() {
    int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    auto at = numeric_address("127.0.0.1", server->port());
    EXPECT_EQ(::connect(fd, at->get(), at->length), 0);
    return fd;
  }
  bool works() {
    auto a = client();
    auto b = client();
    auto key = "key " + std::to_string(++keys);
    EXPECT_TRUE(a->put(key, "value").is_ok());
    return turn({a.get(), b.get()}, [&] {
      auto got = b->get(key);
      return got && *got && **got == "value";
    });
  }
  std::unique_ptr<KvServer> server;
  Status last;
  int keys = 0;
};

TEST_F(KvTcp, AnAddressThatDoesNotAnswerIsNotWaitedForLong) {
  // A listener whose queue is full drops whoever comes, as a firewall does.
  const int silent = ::socket(AF_INET, SOCK_STREAM, 0);
  auto any = numeric_address("127.0.0.1", 0);
  sockaddr_in bound{};
  socklen_t length = sizeof bound;
  ASSERT_EQ(::bind(silent, any->get(), any->length), 0);
  ASSERT_EQ(::listen(silent, 0), 0);
  ASSERT_EQ(::getsockname(silent, reinterpret_cast<sockaddr*>(&bound), &length), 0);
  std::vector<int> queue;
  for (int i = 0; i < 3; ++i) {
    queue.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    (void)::connect(queue.back(), reinterpret_cast<sockaddr*>(&bound), length);
  }
  const uint16_t port = ntohs(bound.sin_port);
  auto opened = TcpKeyValue::open("127.0.0.1", port, secret("the secret of this job"), nullptr);
  ASSERT_TRUE(opened);
  auto& space = **opened;
  const Time begin = SteadyClock().now();
  EXPECT_TRUE(space.poll(begin));
  EXPECT_TRUE(space.poll(begin + 4 * kSecond));
  EXPECT_EQ(space.trouble().message().find("no answer"), std::string::npos);
  EXPECT_TRUE(space.poll(begin + 6 * kSecond));
  EXPECT_NE(space.trouble().message().find("no answer within 5 s"), std::string::npos)
      << space.trouble().message();
  for (const int fd : queue) ::close(fd);
  ::close(silent);
}

TEST_F(KvTcp, AGetWaitsForItsPut) {
  auto a = client();
  auto b = client();
  EXPECT_FALSE(*b->get("later"));
  ASSERT_TRUE(
      turn({a.get(), b.get()}, [&] { return a->trouble().is_ok() && b->trouble().is_ok(); }));
  std::string value(kValueLimit, '\0');
  std::mt19937_64 random(5);
  for (auto& c : value) c = static_cast<char>(random());
  ASSERT_TRUE(a->put("later", value).is_ok());
  ASSERT_TRUE(turn({a.get(), b.get()}, [&] { return b->get("later")->has_value(); }));
  EXPECT_EQ(**b->get("later"), value);
}

TEST_F(KvTcp, AWrongSecretIsRefusedAndTheJobGoesOn) {
  const Said said;
  for (uint64_t strangers = 1; strangers <= 3; ++strangers) {
    last = Status::ok();
    auto stranger = client("a secret of another job");
    ASSERT_TRUE(turn({stranger.get()}, [&] { return !last.is_ok(); }));
    EXPECT_EQ(last.code(), Code::kUnauthenticated) << last.message();
    EXPECT_EQ(server->refused(), strangers);
  }
  EXPECT_TRUE(works());
  EXPECT_EQ(times("refused a connection from 127.0.0.1:", said.text()), 1U) << said.text();
  EXPECT_EQ(times("\n", said.text()), 1U) << said.text();
}

TEST_F(KvTcp, AServerWithoutTheSecretIsNotBelieved) {
  KvServerOptions options;
  options.address = "127.0.0.1";
  options.secret = secret("not the secret of the job");
  auto other = KvServer::start(options);
  ASSERT_TRUE(other);
  std::swap(server, *other);
  auto c = client();
  ASSERT_TRUE(turn({c.get()}, [&] { return !last.is_ok(); }));
  EXPECT_EQ(last.code(), Code::kUnauthenticated);
}

TEST_F(KvTcp, RandomBytesTruncatedAndOverlongFramesAreRefusedAndTheJobGoesOn) {
  const Said said;
  std::mt19937_64 random(11);
  SteadyClock clock;
  for (int round = 0; round < 40; ++round) {
    int fd = raw();
    std::vector<std::byte> bytes(1 + random() % 9000);
    for (auto& b : bytes) b = static_cast<std::byte>(random());
    if (round % 4 == 1)
      bytes = {std::byte{0xff}, std::byte{0xff}, std::byte{0xff}, std::byte{0x7f}};
    if (round % 4 == 2) {  // a frame that ends early
      bytes.clear();
      append_frame({.kind = FrameKind::kProof}, bytes);
      bytes.resize(bytes.size() / 2);
    }
    if (round % 4 == 3) {  // asks before it has proven itself
      bytes.clear();
      append_frame({.kind = FrameKind::kGet, .key = "secret"}, bytes);
    }
    [[maybe_unused]] auto n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    server->serve(clock.now());
    if (round % 4 != 2) ::shutdown(fd, SHUT_WR);
    server->serve(clock.now());
    ::close(fd);
  }
  EXPECT_GE(server->refused(), 20U);
  EXPECT_TRUE(works());
  EXPECT_TRUE(turn({}, [&] { return server->connections() == 0; }));
  EXPECT_EQ(times("refused a connection from 127.0.0.1:", said.text()), 1U) << said.text();
  EXPECT_EQ(times("\n", said.text()), 1U) << said.text();
}

TEST_F(KvTcp, HalfAFrameIsRefusedAndLoggedOnceAHost) {
  const Said said;
  std::vector<std::byte> half;
  append_frame({.kind = FrameKind::kProof}, half);
  half.resize(half.size() / 2);
  for (uint64_t strangers = 1; strangers <= 3; ++strangers) {
    const int fd = raw();
    ASSERT_EQ(::send(fd, half.data(), half.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(half.size()));
    ::close(fd);
    ASSERT_TRUE(turn({}, [&] { return server->refused() == strangers; }));
    EXPECT_EQ(server->connections(), 0U);
  }
  EXPECT_TRUE(works());
  EXPECT_EQ(times("its bytes end within a frame", said.text()), 1U) << said.text();
  EXPECT_EQ(times("\n", said.text()), 1U) << said.text();
}

TEST_F(KvTcp, WhoOnlyLooksIsNoNews) {
  const Said said;
  const int fd = raw();
  ASSERT_TRUE(turn({}, [&] { return server->connections() == 1; }));
  ::close(fd);
  ASSERT_TRUE(turn({}, [&] { return server->connections() == 0; }));
  EXPECT_EQ(server->refused(), 0U);
  EXPECT_EQ(said.text(), "");
}

TEST_F(KvTcp, SilentStrangersCantKeepRanksOut) {
  std::vector<int> strangers;
  for (int i = 0; i < 40; ++i) strangers.push_back(raw());
  EXPECT_TRUE(works());
  EXPECT_LE(server->connections(), 8U + 2U);
  EXPECT_TRUE(turn({}, [&] { return server->connections() == 0; }))
      << "they are dropped after the time-out";
  for (int fd : strangers) ::close(fd);
}

TEST_F(KvTcp, WhoReadsNothingOfWhatItWaitedForIsEnded) {
  // A small buffer of its own; the server's takes some 4 MiB more.
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  const int small = 4096;
  ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
  auto at = numeric_address("127.0.0.1", server->port());
  ASSERT_EQ(::connect(fd, at->get(), at->length), 0);
  ASSERT_TRUE(turn({}, [&] { return server->connections() == 1; }));
  std::vector<std::byte> in(4 + 1 + sizeof(Nonce));
  ASSERT_EQ(::recv(fd, in.data(), in.size(), MSG_WAITALL), static_cast<ssize_t>(in.size()));
  const auto challenge = take_frame(in);
  ASSERT_TRUE(challenge && *challenge);
  std::vector<std::byte> out;
  const Nonce nonce{};
  append_frame({.kind = FrameKind::kProof,
                .nonce = nonce,
                .mac = client_proof(secret("the secret of this job"), (*challenge)->nonce, nonce)},
               out);
  constexpr int kKeys = 3000;
  for (int i = 0; i < kKeys; ++i)
    append_frame({.kind = FrameKind::kGet, .key = std::to_string(i)}, out);
  for (std::size_t sent = 0; sent < out.size();) {
    const auto n = ::send(fd, out.data() + sent, std::min<std::size_t>(out.size() - sent, 4096),
                          MSG_NOSIGNAL | MSG_DONTWAIT);
    sent += n > 0 ? static_cast<std::size_t>(n) : 0;
    server->serve(SteadyClock().now());
  }
  auto other = client();
  for (int i = 0; i < kKeys; ++i)
    ASSERT_TRUE(other->put(std::to_string(i), std::string(kValueLimit, 'x')));
  ASSERT_TRUE(turn({other.get()}, [&] {
    auto last_one = other->get(std::to_string(kKeys - 1));
    return last_one && *last_one;
  }));
  EXPECT_TRUE(turn({other.get()}, [&] { return server->connections() == 1; }));
  EXPECT_EQ(server->refused(), 0U) << "a client that only stood still may come back";
  EXPECT_TRUE(works());
  ::close(fd);
}

TEST_F(KvTcp, WithoutDescriptorsCallersWait) {
  const int stranger = ::socket(AF_INET, SOCK_STREAM, 0);
  auto at = numeric_address("127.0.0.1", server->port());
  {
    const paceline::testing::NoDescriptors none;
    ASSERT_EQ(::connect(stranger, at->get(), at->length), 0);
    SteadyClock clock;
    int ready = 0;
    const Time end = clock.now() + 300 * kMillisecond;
    while (clock.now() < end) {
      server->serve(clock.now());
      pollfd p{server->poll_fd(), POLLIN, 0};
      ready += ::poll(&p, 1, 5);
    }
    EXPECT_LT(ready, 20) << "the connection that nobody takes is reported again and again";
    EXPECT_EQ(server->connections(), 0U);
  }
  EXPECT_TRUE(turn({}, [&] { return server->connections() == 1; }));
  EXPECT_TRUE(works());
  ::close(stranger);
}

TEST_F(KvTcp, AClientConnectsAgainAndSaysAgainWhatItPut) {
  auto a = client();
  ASSERT_TRUE(a->put("before", "1").is_ok());
  ASSERT_TRUE(turn({a.get()}, [&] { return a->trouble().is_ok(); }));
  auto port = server->port();
  server.reset();
  for (int i = 0; i < 2000 && a->trouble().is_ok(); ++i) {
    ASSERT_TRUE(a->poll(SteadyClock().now()));
    ::usleep(1000);
  }
  const auto gone = a->trouble().message();
  EXPECT_NE(gone.find(" is gone: "), std::string::npos) << gone;
  EXPECT_NE(gone.find("which served it, has ended: see what it printed"), std::string::npos);
  KvServerOptions options;
  options.address = "127.0.0.1";
  options.port = port;
  options.secret = secret("the secret of this job");
  auto again = KvServer::start(options);
  ASSERT_TRUE(again) << again.status().message();
  server = std::move(*again);
  auto b = client();
  EXPECT_TRUE(turn({a.get(), b.get()}, [&] { return b->get("before")->has_value(); }));
}

// It asks for a proof as the job's own does, and says welcome to whatever comes.
TEST(KvClient, AServerThatCanNotProveItselfIsNotBelieved) {
  auto at = numeric_address("127.0.0.1", 0);
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(listener, at->get(), at->length), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  auto bound = local_address(listener);
  ASSERT_TRUE(bound);
  auto opened = TcpKeyValue::open("127.0.0.1", bound->port(), secret("the secret of this job"), {});
  ASSERT_TRUE(opened);
  auto& space = **opened;
  ASSERT_TRUE(space.poll(SteadyClock().now()));
  const int fd = ::accept(listener, nullptr, nullptr);
  std::mt19937_64 random(9);
  const auto say = [&](FrameKind kind) {
    KvFrame frame{.kind = kind};
    for (auto& b : frame.nonce) b = static_cast<std::byte>(random());
    for (auto& b : frame.mac) b = static_cast<std::byte>(random());
    std::vector<std::byte> bytes;
    append_frame(frame, bytes);
    ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  };
  say(FrameKind::kChallenge);
  Status told;
  std::byte proof[512];
  for (int i = 0; i < 2000 && told.is_ok(); ++i) {
    told = space.poll(SteadyClock().now());
    if (::recv(fd, proof, sizeof proof, MSG_DONTWAIT) > 0) say(FrameKind::kWelcome);
    ::usleep(1000);
  }
  EXPECT_EQ(told.code(), Code::kUnauthenticated) << told.message();
  EXPECT_NE(told.message().find("does not know the secret"), std::string::npos) << told.message();
  ::close(fd);
  ::close(listener);
}

TEST(KvServer, WithoutDescriptorsTheirLimitIsNamed) {
  for (const int spare : {0, 1}) {
    const paceline::testing::NoDescriptors none(spare);
    auto server = KvServer::start({.address = "127.0.0.1"});
    ASSERT_FALSE(server) << spare;
    EXPECT_EQ(server.status().code(), Code::kResourceExhausted) << server.status().message();
    EXPECT_NE(server.status().message().find("ulimit -n"), std::string::npos)
        << server.status().message();
    EXPECT_EQ(server.status().message().find("port"), std::string::npos);
  }
}

TEST(Secret, TooShortAndReadableByOthersAreRefused) {
  auto none = [](const std::string&) { return std::optional<std::string>(); };
  auto with = [&](std::map<std::string, std::string> variables) -> Result<std::optional<Secret>> {
    auto get = [&](const std::string& name) -> std::optional<std::string> {
      return variables.contains(name) ? std::optional(variables[name]) : std::nullopt;
    };
    PACELINE_ASSIGN(auto settings, Settings::load(Face::kPaceline, get,
                                                  [] { return std::vector<std::string>(); }));
    return find_secret(settings, Identity(), none);
  };
  EXPECT_FALSE(with({{"PACELINE_SECRET", "short"}}));
  char path[] = "/tmp/paceline-secret-XXXXXX";
  int fd = ::mkstemp(path);
  ASSERT_EQ(::write(fd, "sixteen characters\n", 19), 19);
  ASSERT_EQ(::fchmod(fd, 0600), 0);
  auto good = with({{"PACELINE_SECRET_FILE", path}});
  ASSERT_TRUE(good && *good) << good.status().message();
  auto same = with({{"PACELINE_SECRET", "sixteen characters"}});
  EXPECT_EQ((*good)->bytes, (*same)->bytes);
  ASSERT_EQ(::ftruncate(fd, 15), 0);
  auto brief = with({{"PACELINE_SECRET_FILE", path}});
  ASSERT_FALSE(brief);
  EXPECT_NE(brief.status().message().find("holds 15 characters"), std::string::npos);
  ASSERT_EQ(::fchmod(fd, 0644), 0);
  auto open = with({{"PACELINE_SECRET_FILE", path}});
  ASSERT_FALSE(open);
  EXPECT_NE(open.status().message().find("chmod 600"), std::string::npos);
  auto nowhere = with({{"PACELINE_SECRET_FILE", "/no/such/file"}});
  ASSERT_FALSE(nowhere);
  for (const char* words : {"PACELINE_SECRET_FILE '/no/such/file'", "No such file or directory",
                            "openssl rand -hex 32 > '/no/such/file'", "copy it to every host"})
    EXPECT_NE(nowhere.status().message().find(words), std::string::npos)
        << nowhere.status().message();
  ::close(fd);
  ::unlink(path);
}

TEST(Interface, NcclsSyntax) {
  auto make = [](const char* name, const char* address) {
    return InterfaceAddress{name, *numeric_address(address, 0)};
  };
  std::vector<InterfaceAddress> all{make("lo", "127.0.0.1"),   make("docker0", "172.17.0.1"),
                                    make("eth0", "10.0.0.1"),  make("eth0", "fd00::1"),
                                    make("eth01", "10.0.1.1"), make("ib0", "10.1.0.1")};
  auto pick = [&](const char* pattern, bool v6 = false) {
    auto chosen = choose_interface(pattern, all, v6, "PACELINE_INTERFACE");
    return chosen ? chosen->host() : chosen.status().message();
  };
  EXPECT_EQ(pick("eth"), "10.0.0.1");
  EXPECT_EQ(pick("=eth01"), "10.0.1.1");
  EXPECT_EQ(pick("ib,eth"), "10.0.0.1") << "the system's order";
  EXPECT_EQ(pick("^docker"), "10.0.0.1");
  EXPECT_EQ(pick("^docker,eth"), "10.1.0.1");
  EXPECT_EQ(pick("^=eth0,docker0"), "10.0.1.1");
  EXPECT_EQ(pick("eth0", true), "fd00::1");
  EXPECT_EQ(pick("lo"), "127.0.0.1");
  auto missing = pick("wlan");
  for (const char* name : {"wlan", "eth0", "ib0", "docker0"})
    EXPECT_NE(missing.find(name), std::string::npos);
}

}  // namespace
}  // namespace paceline::bootstrap
