// The programs that tc gets, run here by a small interpreter of classic BPF.
#include "cli/lab/shaping.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <sstream>
#include <vector>

namespace paceline::lab {
namespace {

struct Instruction {
  uint32_t code, jump_true, jump_false, k;
};

std::vector<Instruction> read_program(std::string text) {
  for (auto& c : text) c = c == ',' ? ' ' : c;
  std::istringstream in(text);
  std::size_t count = 0;
  in >> count;
  std::vector<Instruction> program(count);
  for (auto& i : program) in >> i.code >> i.jump_true >> i.jump_false >> i.k;
  EXPECT_FALSE(in.fail());
  return program;
}

/// What the program answers for a frame; the kernel refuses loads beyond its end with 0.
uint32_t run(const std::vector<Instruction>& program, const std::vector<uint8_t>& frame,
             uint32_t random = 0) {
  uint32_t a = 0, x = 0, memory[16] = {};
  auto load = [&](std::size_t at, std::size_t bytes, bool& ok) {
    uint32_t value = 0;
    ok = at + bytes <= frame.size();
    for (std::size_t i = 0; ok && i < bytes; ++i) value = value << 8 | frame[at + i];
    return value;
  };
  for (std::size_t pc = 0; pc < program.size(); ++pc) {
    const auto& i = program[pc];
    bool ok = true;
    switch (i.code) {
      case 0x20:
        a = i.k == 0xfffff000U + 56 ? random : load(i.k, 4, ok);
        break;
      case 0x28:
        a = load(i.k, 2, ok);
        break;
      case 0x30:
        a = load(i.k, 1, ok);
        break;
      case 0x48:
        a = load(x + i.k, 2, ok);
        break;
      case 0xb1:
        x = 4 * (load(i.k, 1, ok) & 15);
        break;
      case 0x61:
        x = memory[i.k];
        break;
      case 0x02:
        memory[i.k] = a;
        break;
      case 0x54:
        a &= i.k;
        break;
      case 0x44:
        a |= i.k;
        break;
      case 0x04:
        a += i.k;
        break;
      case 0x0c:
        a += x;
        break;
      case 0x24:
        a *= i.k;
        break;
      case 0x05:
        pc += i.k;
        break;
      case 0x15:
        pc += a == i.k ? i.jump_true : i.jump_false;
        break;
      case 0x35:
        pc += a >= i.k ? i.jump_true : i.jump_false;
        break;
      case 0x45:
        pc += (a & i.k) != 0 ? i.jump_true : i.jump_false;
        break;
      case 0x06:
        return i.k;
      case 0x16:
        return a;
      default:
        ADD_FAILURE() << "opcode " << i.code;
        return 0;
    }
    if (!ok) return 0;
  }
  ADD_FAILURE() << "the program runs over its end";
  return 0;
}

std::vector<uint8_t> frame(uint8_t protocol, uint16_t source, uint16_t destination, uint8_t address,
                           unsigned options = 0) {
  std::vector<uint8_t> f(14 + 20 + options + 20);
  f[12] = 0x08;
  f[14] = static_cast<uint8_t>(0x40 | (5 + options / 4));
  f[23] = protocol;
  f[33] = address;
  auto ports = 34 + options;
  f[ports] = static_cast<uint8_t>(source >> 8);
  f[ports + 1] = static_cast<uint8_t>(source);
  f[ports + 2] = static_cast<uint8_t>(destination >> 8);
  f[ports + 3] = static_cast<uint8_t>(destination);
  return f;
}

TEST(Shaping, BurstHoldsABatchAndEightyMicroseconds) {
  EXPECT_EQ(burst_bytes(1e9), 72000U);
  EXPECT_EQ(burst_bytes(25e9), 250000U);
  EXPECT_GE(queue_bytes(1e9), 4 * burst_bytes(1e9));
  EXPECT_EQ(batch_bytes(1e9), kLargestBatch);
  EXPECT_EQ(batch_bytes(5e9), 59500U);
  EXPECT_EQ(batch_bytes(25e9), kLargestBatch);
  for (int step = 0; step <= 128; ++step) {
    const double rate = 1e6 * std::pow(1.1, step);  // to 200 Gb/s
    EXPECT_LE(batch_bytes(rate), kLargestBatch) << rate;
    EXPECT_GE(batch_bytes(rate), 54000U) << rate << ": not much smaller, for the processor's sake";
    if (batch_bytes(rate) < kLargestBatch) {
      EXPECT_NEAR(static_cast<double>(batch_bytes(rate)) + rate / 8 * 20e-6,
                  static_cast<double>(burst_bytes(rate)), 1)
          << rate;
    }
  }
}

TEST(Shaping, FlowsGetClassesOfTheirOwn) {
  auto program = read_program(flow_bytecode());
  std::set<uint32_t> classes;
  for (uint16_t i = 0; i < kFlowClasses; ++i) {
    auto c = run(program, frame(6, static_cast<uint16_t>(40000 + i), 7000, 2));
    EXPECT_EQ(c >> 16, 0x20U);
    EXPECT_GE(c & 0xffff, 2U);
    EXPECT_LE(c & 0xffff, kFlowClasses + 1U);
    classes.insert(c);
  }
  EXPECT_EQ(classes.size(), static_cast<std::size_t>(kFlowClasses));  // neighbours never meet
}

TEST(Shaping, AFlowKeepsItsClassAndHeadersDoNotMatter) {
  auto program = read_program(flow_bytecode());
  std::mt19937 random(std::random_device{}());
  for (int i = 0; i < 200; ++i) {
    auto source = static_cast<uint16_t>(random()), destination = static_cast<uint16_t>(random());
    auto address = static_cast<uint8_t>(random());
    auto one = run(program, frame(17, source, destination, address));
    EXPECT_EQ(one, run(program, frame(17, source, destination, address, 4 * (random() % 10))));
    EXPECT_NE(one, 0U);
  }
}

TEST(Shaping, WhatIsNoFlowGoesTheCommonWay) {
  auto program = read_program(flow_bytecode());
  constexpr uint32_t kCommon = 0x200001;
  auto arp = frame(6, 1, 2, 3);
  arp[13] = 0x06;
  EXPECT_EQ(run(program, arp), kCommon);
  EXPECT_EQ(run(program, frame(1, 1, 2, 3)), kCommon);  // ICMP
  auto fragment = frame(17, 1, 2, 3);
  fragment[21] = 5;
  EXPECT_EQ(run(program, fragment), kCommon);
}

TEST(Shaping, LossDropsItsShareOfAllRandomNumbers) {
  std::mt19937 random(std::random_device{}());
  for (double share : {0.001, 0.05, 0.5}) {
    auto program = read_program(loss_bytecode(share));
    int dropped = 0;
    constexpr int kPackets = 200000;
    for (int i = 0; i < kPackets; ++i) {
      auto verdict = run(program, {}, static_cast<uint32_t>(random()));
      EXPECT_TRUE(verdict == 0 || verdict == 2);
      dropped += verdict == 2 ? 1 : 0;
    }
    auto sigma = std::sqrt(share * (1 - share) / kPackets);
    EXPECT_NEAR(static_cast<double>(dropped) / kPackets, share, 6 * sigma);
  }
}

}  // namespace
}  // namespace paceline::lab
