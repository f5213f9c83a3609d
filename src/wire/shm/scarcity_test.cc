// What a machine or a container may lack: memory, descriptors, rights, a common view of processes.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/testing/no_descriptors.h"
#include "base/testing/said.h"
#include "wire/shm/packet.h"
#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

using paceline::testing::Said;
using paceline::testing::times;

constexpr std::size_t kLong = 8 * 1024 * 1024;

// ---- scarce memory

/// A mounted tmpfs of `bytes`; empty where this process may not mount (the test is skipped then).
class TinyTmpfs {
 public:
  explicit TinyTmpfs(const std::string& bytes) {
    char name[] = "/tmp/paceline-tiny-XXXXXX";
    path = ::mkdtemp(name);
    mounted = ::mount("tmpfs", path.c_str(), "tmpfs", 0, ("size=" + bytes).c_str()) == 0;
  }
  ~TinyTmpfs() {
    if (mounted) ::umount(path.c_str());
    ::rmdir(path.c_str());
  }
  std::string path;
  bool mounted = false;
};

TEST(Scarcity, AFullDevShmMeansSmallerRingsAndPrivateBuffers) {
  TinyTmpfs tiny("300k");
  if (!tiny.mounted) GTEST_SKIP() << "only root can mount a small tmpfs";
  std::optional<Said> said;
  run_ranks(
      2,
      [&](Node& node) {
        talk(node, 1 - node.rank, 0);
        auto& allocator = *node.channel->allocator();
        for (int again = 0; again < 3; ++again) {
          auto* memory = static_cast<std::byte*>(allocator.allocate(kLong));
          ASSERT_NE(memory, nullptr);
          EXPECT_EQ(allocator.offset_of(memory, 1).has_value(), node.rank == 1);
          std::memset(memory, 1, kLong);
          EXPECT_TRUE(allocator.free(memory));
        }
        node.meet();
        const auto text = said->text();
        const std::size_t once = node.rank == 0 ? 1 : 0;
        EXPECT_EQ(times("little shared memory: ", text), once) << text;
        EXPECT_EQ(times("going on with smaller rings", text), once) << text;
        EXPECT_EQ(times("are private memory instead: ", text), once) << text;
        EXPECT_EQ(times("No space left on device", text), 2 * once) << text;
        EXPECT_EQ(times(tiny.path, text), 2 * once) << text;
      },
      [&](ShmOptions& o) {
        said.emplace();  // in the rank's process, before its channel is there
        if (o.rank == 0) o.sources = {false, {tiny.path}};
        o.ring_bytes = 512 * 1024;
        o.use_vm_read = o.rank == 0;
      });
}

TEST(Scarcity, NoMemoryAtAllIsAnErrorThatNamesTheFix) {
  TinyTmpfs tiny("64k");
  if (!tiny.mounted) GTEST_SKIP() << "only root can mount a small tmpfs";
  ShmOptions options;
  options.sources = {false, {tiny.path, "/nonexistent"}};
  auto made = ShmChannel::create(options);
  ASSERT_FALSE(made.is_ok());
  EXPECT_EQ(made.status().code(), Code::kResourceExhausted);
  EXPECT_NE(made.status().message().find(tiny.path), std::string::npos);
  EXPECT_NE(made.status().message().find("--shm-size"), std::string::npos);
}

TEST(Scarcity, AFileSizeLimitEndsNoProcess) {
  run_ranks(
      2,
      [](Node& node) {
        talk(node, 1 - node.rank, 0);
        auto* memory = node.channel->allocator()->allocate(kLong);
        ASSERT_NE(memory, nullptr);
        std::memset(memory, 1, kLong);
        node.meet();
      },
      [](ShmOptions&) {
        rlimit limit{1024 * 1024, 1024 * 1024};
        ::setrlimit(RLIMIT_FSIZE, &limit);
      });
}

/// Connected by a short message, with nothing of the arena gone over yet; then rank 1 has no descriptor left.
void connect_without(std::optional<paceline::testing::NoDescriptors>& none, Node& node) {
  std::byte word[8]{};
  std::byte back[8]{};
  node.channel->send(1 - node.rank, 7, 1, word, 1);
  node.channel->receive(1 - node.rank, 7, 1, {back, nullptr, 8}, 2);
  EXPECT_TRUE(node.wait(1).status.is_ok());
  EXPECT_TRUE(node.wait(2).status.is_ok());
  node.meet();
  if (node.rank == 1) none.emplace();
  node.meet();
}

// The peer's arena is announced when it is first used: on a rank that can't take its descriptor all goes another way.
TEST(Scarcity, WithoutDescriptorsSharedBuffersAreCopied) {
  for (const bool from_arena : {true, false}) {
    for (const bool vm_read : {true, false}) {
      run_ranks(
          2,
          [&](Node& node) {
            std::optional<paceline::testing::NoDescriptors> none;
            connect_without(none, node);
            // Several at once, so that pieces of one come between those of another.
            std::vector<std::byte*> out(3);
            std::vector<std::vector<std::byte>> in(3);
            auto& arena = *node.channel->allocator();
            for (unsigned i = 0; i < 3; ++i) {
              const auto content = pattern(kLong + i, i);
              if (node.rank == 0) {
                out[i] = static_cast<std::byte*>(from_arena ? arena.allocate(content.size())
                                                            : std::malloc(content.size()));
                ASSERT_NE(out[i], nullptr);
                std::memcpy(out[i], content.data(), content.size());
                node.channel->send(1, 40 + i, 1, {out[i], content.size()}, 5 + i);
              } else {
                in[i].resize(content.size());
                node.channel->receive(0, 40 + i, 1, {in[i].data(), nullptr, in[i].size()}, 5 + i);
              }
            }
            for (unsigned i = 0; i < 3; ++i) {
              const auto done = node.wait(5 + i);
              EXPECT_TRUE(done.status.is_ok()) << done.status.to_string();
              if (node.rank == 1) {
                EXPECT_EQ(in[i], pattern(kLong + i, i));
              } else {
                from_arena ? (void)arena.free(out[i]) : std::free(out[i]);
              }
            }
            node.meet();
            EXPECT_TRUE(node.losses.empty());
            talk(node, 1 - node.rank, 1000);  // the other way too
            node.meet();
          },
          [&](ShmOptions& o) { o.use_vm_read = vm_read; });
    }
  }
}

/// Answers with what it got, turned round.
class Inverter final : public Sink {
 public:
  explicit Inverter(std::size_t bytes) : data(bytes) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    std::copy(piece.begin(), piece.end(), data.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  bool consume_and_answer(uint64_t offset, std::span<const std::byte> piece,
                          std::byte* place) override {
    consume(offset, piece);
    std::transform(piece.begin(), piece.end(), place, [](std::byte b) { return ~b; });
    return true;
  }
  std::vector<std::byte> data;
};

// UBSan opens a pipe to look at an object's type, and fails the process where it gets none.
#if defined(__has_feature)
#if __has_feature(undefined_behavior_sanitizer)
#define PACELINE_TEST_NEEDS_DESCRIPTORS 1
#endif
#endif

#ifndef PACELINE_TEST_NEEDS_DESCRIPTORS
// Who can't map the slots that would bring private memory, and its answer back, reads it as if none were wanted.
TEST(Scarcity, WithoutDescriptorsNoAnswerComesInSlots) {
  for (const bool vm_read : {true, false}) {
    run_ranks(
        2,
        [&](Node& node) {
          std::optional<paceline::testing::NoDescriptors> none;
          connect_without(none, node);
          const auto content = pattern(kLong, 3);
          if (node.rank == 0) {
            auto data = content;
            node.channel->send_with_answer(1, 40, 1, data, 5, {data.data(), 0});
            EXPECT_TRUE(node.wait(5).status.is_ok());
            EXPECT_EQ(data, content);
          } else {
            Inverter sink(kLong);
            node.channel->receive(0, 40, 1, {nullptr, &sink, kLong}, 5);
            const auto taken = node.wait(5);
            EXPECT_TRUE(taken.status.is_ok()) << taken.status.to_string();
            EXPECT_EQ(taken.answered, 0U);
            EXPECT_EQ(sink.data, content);
          }
          node.meet();
          EXPECT_TRUE(node.losses.empty());
        },
        [&](ShmOptions& o) { o.use_vm_read = vm_read; });
  }
}

/// What rank 1, which can open `spare` descriptors more, and rank 0 hear of a message each way.
void exchange_with_few(Node& node, int spare, std::size_t bytes) {
  std::optional<paceline::testing::NoDescriptors> few;
  if (node.rank == 1) few.emplace(spare);
  node.meet();
  const auto out = pattern(bytes, 3);
  std::vector<std::byte> in(out.size());
  const Rank peer = 1 - node.rank;
  node.channel->receive(peer, 1, 1, {in.data(), nullptr, in.size()}, 6);
  node.channel->send(peer, 1, 1, out, 5);
  const auto done = node.wait(6);
  const bool sent = node.wait(5).status.is_ok();
  // A short message counts as sent when the ring holds it, so also where the other one gives up before it looks.
  const bool held = bytes <= ShmOptions{}.eager_limit;
  EXPECT_TRUE(sent == done.status.is_ok() || (held && sent)) << done.status.to_string();
  if (done.status.is_ok()) {
    EXPECT_EQ(in, out);
    return node.meet();
  }
  // What this rank found, or that the other one has left.
  const std::string& text = done.status.message();
  EXPECT_TRUE(done.status.code() == Code::kPeerLost || text.find("ulimit -n") != std::string::npos)
      << done.status.to_string();
  EXPECT_NE(text.find(fmt::format("rank {} (host", peer)), std::string::npos) << text;
  EXPECT_LT(spare, 8) << text;
}

// However few descriptors a rank has left, its messages come, or both hear why not.
TEST(Scarcity, ConnectingWithFewDescriptorsWorksOrIsNamed) {
  for (const std::size_t bytes : {1000, 10'000}) {
    for (int spare = 0; spare < 10; ++spare) {
      run_ranks(2, [&](Node& node) { exchange_with_few(node, spare, bytes); });
    }
  }
}

TEST(Scarcity, WithoutDescriptorsCallersWaitAndNobodySpins) {
  run_ranks(2, [](Node& node) {
    const Said said;
    std::optional<paceline::testing::NoDescriptors> none;
    if (node.rank == 1) none.emplace();
    node.meet();
    std::vector<std::byte> word(8);
    if (node.rank == 0) {
      node.channel->send(1, 1, 0, word, 1);
      for (int i = 0; i < 10; ++i) node.step();
    }
    node.meet();
    if (node.rank == 1) {
      const Time end = node.clock.now() + 350 * kMillisecond;
      int looks = 0;
      for (; node.clock.now() < end; ++looks) node.step(true);
      EXPECT_LT(looks, 50) << "the listener is readable all the time";
      EXPECT_TRUE(node.losses.empty());
      none.reset();
      node.channel->receive(0, 1, 0, {word.data(), nullptr, word.size()}, 1);
    }
    EXPECT_TRUE(node.wait(1).status.is_ok());
    talk(node, 1 - node.rank, 5000);
    node.meet();
    if (node.rank == 0) return;
    EXPECT_EQ(times("raise 'ulimit -n'", said.text()), 1U) << said.text();
  });
}
#endif

// ---- surroundings

/// Goes on in a child of a new pid namespace, where no process number of the others means anything.
bool enter_pid_namespace() {
  if (::unshare(CLONE_NEWPID) != 0) return false;
  pid_t pid = ::fork();
  if (pid == 0) return true;
  int status = 0;
  ::waitpid(pid, &status, 0);
  std::_Exit(WIFEXITED(status) ? WEXITSTATUS(status) : 4);
}

TEST(Surroundings, DifferentPidNamespaces) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a pid namespace";
  run_ranks(
      2,
      [](Node& node) {
        talk(node, 1 - node.rank, 0);
        // Nobody in the inner namespace can name a process outside.
        if (node.rank == 1) {
          EXPECT_NE(node.channel->describe().find("copies"), std::string::npos)
              << node.channel->describe();
        }
        node.meet();
      },
      [](ShmOptions& o) {
        if (o.rank == 1) {
          ASSERT_TRUE(enter_pid_namespace());
        }
      });
}

TEST(Surroundings, WithoutRootAndUndumpable) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  for (int dumpable : {0, 1}) {
    run_ranks(
        2,
        [&](Node& node) {
          talk(node, 1 - node.rank, 0);
          const bool copies = node.channel->describe().find("copies") != std::string::npos;
          EXPECT_EQ(copies, dumpable == 0) << node.channel->describe();
          node.meet();
        },
        [&](ShmOptions&) {
          ASSERT_EQ(::setgid(65534), 0);
          ASSERT_EQ(::setuid(65534), 0);
          ::prctl(PR_SET_DUMPABLE, dumpable);
        });
  }
}

}  // namespace
}  // namespace paceline::wire::shm::testing
