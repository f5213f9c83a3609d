// The handshake's packets and the ring, alone: what one side writes the other reads, and nothing
// else passes.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "base/shared_memory.h"
#include "wire/shm/handshake.h"
#include "wire/shm/ring.h"

namespace paceline::wire::shm {
namespace {

Hello some_hello() {
  Hello hello{3, 1, 8, "wire 1, build x", {}};
  random_bytes(hello.nonce);
  return hello;
}

TEST(Handshake, PacketsRoundTrip) {
  const Hello hello = some_hello();
  auto back = decode(encode(hello));
  ASSERT_TRUE(back.is_ok());
  const auto& seen = std::get<Hello>(*back);
  EXPECT_EQ(seen.from, 3);
  EXPECT_EQ(seen.to, 1);
  EXPECT_EQ(seen.size, 8);
  EXPECT_EQ(seen.version, hello.version);
  EXPECT_EQ(seen.nonce, hello.nonce);

  Proof proof{{}, 128 * 1024, true, {0x1234, {}}};
  random_bytes(proof.mac);
  random_bytes(proof.probe.token);
  auto proof_back = decode(encode(proof));
  ASSERT_TRUE(proof_back.is_ok());
  EXPECT_EQ(std::get<Proof>(*proof_back).mac, proof.mac);
  EXPECT_EQ(std::get<Proof>(*proof_back).ring_bytes, proof.ring_bytes);
  EXPECT_TRUE(std::get<Proof>(*proof_back).has_pidfd);
  EXPECT_EQ(std::get<Proof>(*proof_back).probe.token, proof.probe.token);
}

TEST(Handshake, EveryTruncationAndAnyTrailingByteIsRefused) {
  const Message messages[] = {some_hello(),
                              Challenge{},
                              Proof{{}, 65536, false, {}},
                              Welcome{},
                              Refusal{RefusalReason::kSecret, "no"},
                              Arena{4096}};
  for (const auto& message : messages) {
    auto bytes = encode(message);
    ASSERT_TRUE(decode(bytes).is_ok());
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      EXPECT_FALSE(decode(std::span(bytes).first(n)).is_ok()) << message.index() << " cut to " << n;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode(bytes).is_ok());
  }
}

TEST(Handshake, RingSizesOutsideTheBoundsAreRefused) {
  for (uint64_t ring : {uint64_t{0}, uint64_t{4096}, kRingLeast - 1, kRingLeast + 1,
                        kRingMost + 4096, ~uint64_t{0}}) {
    EXPECT_FALSE(decode(encode(Proof{{}, ring, false, {}})).is_ok()) << ring;
  }
}

TEST(Handshake, ProofsDifferBySecretRoleNonceAndRanks) {
  const Hello hello = some_hello();
  Nonce nonce{};
  random_bytes(nonce);
  const Mac mac = prove("secret", ProofBy::kAccepting, hello, nonce);
  EXPECT_EQ(mac, prove("secret", ProofBy::kAccepting, hello, nonce));
  EXPECT_NE(mac, prove("secret2", ProofBy::kAccepting, hello, nonce));
  EXPECT_NE(mac, prove("secret", ProofBy::kConnecting, hello, nonce));
  Hello other = hello;
  other.from = 2;
  EXPECT_NE(mac, prove("secret", ProofBy::kAccepting, other, nonce));
  other = hello;
  other.nonce[0] ^= std::byte{1};
  EXPECT_NE(mac, prove("secret", ProofBy::kAccepting, other, nonce));
  nonce[31] ^= std::byte{1};
  EXPECT_NE(mac, prove("secret", ProofBy::kAccepting, hello, nonce));
}

struct RingFixture {
  explicit RingFixture(uint64_t capacity)
      : memory(SharedMemory::create(segment_bytes(capacity), SharedMemory::Pages::kReserve, {})
                   .value()),
        page(reinterpret_cast<Page*>(memory.data())),
        ring(memory.data() + kPageBytes),
        writer(ring, capacity, &page->side[0], &page->side[1]),
        reader(ring, capacity, &page->side[1], &page->side[0]) {}
  SharedMemory memory;
  Page* page;
  std::byte* ring;
  RingWriter writer;
  RingReader reader;
};

TEST(Ring, TwoThreadsPassRandomRecordsInOrder) {
  constexpr uint64_t kCapacity = 64 * 1024;
  RingFixture f(kCapacity);
  const unsigned seed = std::random_device{}();
  constexpr int kRecords = 20'000;
  auto size_at = [](std::mt19937& random, uint64_t limit) {
    return random() % 4 == 0 ? random() % (limit + 1) : random() % 200;
  };
  std::thread producer([&] {
    std::mt19937 random(seed);
    std::vector<std::byte> payload;
    for (int i = 0; i < kRecords; ++i) {
      payload.assign(size_at(random, f.writer.payload_limit()), static_cast<std::byte>(i));
      RecordHeader header;
      header.type = RecordType::kNote;
      header.id = static_cast<uint64_t>(i);
      while (!f.writer.write(header, payload)) std::this_thread::yield();
    }
  });
  std::mt19937 random(seed);
  for (int i = 0; i < kRecords; ++i) {
    const auto expected = size_at(random, f.writer.payload_limit());
    RingReader::Record record;
    RingReader::State state;
    while ((state = f.reader.peek(record)) == RingReader::State::kEmpty) std::this_thread::yield();
    ASSERT_EQ(state, RingReader::State::kRecord);
    ASSERT_EQ(record.header.id, static_cast<uint64_t>(i));
    ASSERT_EQ(record.payload.size(), expected);
    for (std::byte b : record.payload) ASSERT_EQ(b, static_cast<std::byte>(i));
    f.reader.pop();
  }
  producer.join();
}

TEST(Ring, FullMeansFalseAndRoomComesBack) {
  constexpr uint64_t kCapacity = 64 * 1024;
  RingFixture f(kCapacity);
  RecordHeader header;
  header.type = RecordType::kNote;
  uint64_t written = 0;
  while (f.writer.write(header, {})) ++written;
  EXPECT_EQ(written, kCapacity / kLine);
  EXPECT_FALSE(f.writer.may_fit(0));
  RingReader::Record record;
  ASSERT_EQ(f.reader.peek(record), RingReader::State::kRecord);
  f.reader.pop();
  EXPECT_TRUE(f.writer.write(header, {}));
  EXPECT_FALSE(f.writer.write(header, {}));
}

TEST(Ring, ImpossibleHeadsAndSizesAreBroken) {
  constexpr uint64_t kCapacity = 64 * 1024;
  for (uint64_t head : {uint64_t{1}, uint64_t{63}, kCapacity + kLine, ~uint64_t{0}, uint64_t{96}}) {
    RingFixture f(kCapacity);
    f.page->side[0].head.store(head);
    RingReader::Record record;
    EXPECT_EQ(f.reader.peek(record), RingReader::State::kBroken) << head;
  }
  for (uint32_t payload : {uint32_t{1}, uint32_t{64}, UINT32_MAX, UINT32_MAX - 63}) {
    RingFixture f(kCapacity);
    RecordHeader header;
    header.type = RecordType::kNote;
    header.payload = payload;
    std::memcpy(f.ring, &header, sizeof(header));
    f.page->side[0].head.store(kLine);
    RingReader::Record record;
    EXPECT_EQ(f.reader.peek(record), RingReader::State::kBroken) << payload;
  }
}

TEST(Ring, ATailThatLiesGivesNoRoom) {
  constexpr uint64_t kCapacity = 64 * 1024;
  RingFixture f(kCapacity);
  RecordHeader header;
  while (f.writer.write(header, {})) {
  }
  f.page->side[1].tail.store(~uint64_t{0});
  EXPECT_FALSE(f.writer.write(header, {}));
  f.page->side[1].tail.store(kCapacity + kLine);
  EXPECT_FALSE(f.writer.write(header, {}));
}

}  // namespace
}  // namespace paceline::wire::shm
