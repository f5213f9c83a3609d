// All-reduce by direct exchange: every rank sends each other rank that one's shard, owners sum and
// send the result to all. The ring's bytes in two hops instead of 2 (n-1), at the price of n-1
// peers; and each element is rounded once on its way to the sum and once on its way back when a
// codec carries it, whatever n is.
#include "plan/algorithms.h"

namespace paceline::plan {

Coding flat_coding(const Builder& b) {
  const CodecSpec& codec = b.request().codec;
  if (codec.codec != Codec::kFp16 && codec.codec != Codec::kBf16) return Coding::kNever;
  return codec.inside_node ? Coding::kAlways : Coding::kBetweenNodes;
}

bool travels_encoded(const Builder& b, Rank a, Rank c, Coding coding) {
  return coding == Coding::kAlways || (coding == Coding::kBetweenNodes && !b.same_node(a, c));
}

namespace {

// The last of an owner's contributors gets the sum back as soon as it is there, if both can see each other's memory.
// (It is the place after the owner's, so with two ranks it is the other one.)
bool is_answered(const Builder& b, const Members& m, Rank peer, Coding coding, int offset) {
  return offset == m.size() - 1 && b.same_node(b.me(), peer) &&
         !travels_encoded(b, b.me(), peer, coding);
}

// Whether any rank gets anything encoded: all of them see this alike. The sum is then rounded once more after it would
// have been given as an answer, so none is.
bool any_encoded(const Builder& b, const Members& m, Coding coding) {
  bool any = false;
  for (int offset = 1; offset < m.size(); ++offset)
    any |= travels_encoded(b, b.me(), m.at(m.mine + offset), coding);
  return any;
}

// Sends go to the next place first, then the one after …: at any time every rank is the target of
// one other.
void send_contributions(Builder& b, const Members& m, const std::vector<std::vector<Span>>& cut,
                        From from, Coding coding, int offset, bool comes_back) {
  Rank peer = m.at(m.mine + offset);
  auto place = static_cast<std::size_t>((m.mine + offset) % m.size());
  bool encoded = travels_encoded(b, b.me(), peer, coding);
  bool answered = comes_back && is_answered(b, m, peer, coding, offset);
  for (std::size_t p = 0; p < cut[place].size(); ++p) {
    Span piece = cut[place][p];
    Range own = from == From::kInput ? b.in(piece) : b.out(piece);
    if (answered) {
      b.send_for_answer(peer, own, b.out(piece), p);
      continue;
    }
    if (encoded) {
      Range code = b.encoding(piece);
      b.encode(code, own);
      own = code;
    }
    b.send(peer, own, p);
  }
}

// The first rank's contribution is added as it arrives. The others' must wait for it: across nodes they
// arrive in scratch meanwhile, for a receive that is posted only when its turn has come costs a round
// trip, through all that is queued before the link.
void add_contributions(Builder& b, const Members& m, const std::vector<Span>& mine, From from,
                       Coding coding, int offset, uint64_t output_begin,
                       const Afterwards& afterwards) {
  Answers* answers = afterwards.answers;
  Rank peer = m.at(m.mine - offset);
  bool encoded = travels_encoded(b, b.me(), peer, coding);
  bool answered = answers != nullptr && is_answered(b, m, peer, coding, offset);
  bool waits_in_scratch = offset > 1 && !b.same_node(b.me(), peer);
  bool is_left_to_encoder = afterwards.addends != nullptr && offset == m.size() - 1;
  for (std::size_t p = 0; p < mine.size(); ++p) {
    Range sum = b.out({mine[p].begin - output_begin, mine[p].end - output_begin});
    Range left = offset == 1 && from == From::kInput ? b.in(mine[p]) : sum;
    if (answered) {
      answers->push_back(b.receive_reduce_answering(peer, sum, left, p));
    } else if (waits_in_scratch) {
      Range arrived = encoded ? b.encoding(mine[p]) : b.scratch(sum.bytes);
      b.receive(peer, arrived, p);
      if (encoded) {
        b.decode_reduce(sum, arrived);
      } else {
        b.reduce(sum, arrived);
      }
    } else if (encoded) {
      b.receive_decode_reduce(peer, sum, left, p);
    } else if (is_left_to_encoder && left == sum) {
      const uint32_t step = b.receive_reduce_held(peer, sum, p);
      if (step != kNoStep) afterwards.addends->push_back(step);
    } else {
      b.receive_reduce(peer, sum, left, p);
    }
  }
}

std::vector<std::vector<Span>> cut_all(const Builder& b, const std::vector<Span>& shards) {
  uint64_t whole = 0;
  for (Span s : shards) whole += s.size();
  std::vector<std::vector<Span>> out;
  out.reserve(shards.size());
  for (Span s : shards) out.push_back(pieces(b.request(), s, whole));
  return out;
}

}  // namespace

void direct_reduce_scatter(Builder& b, const Members& m, const std::vector<Span>& shards, From from,
                           Coding coding, uint64_t output_begin, const Afterwards& afterwards) {
  auto cut = cut_all(b, shards);
  for (int offset = 1; offset < m.size(); ++offset) {
    send_contributions(b, m, cut, from, coding, offset, afterwards.answers != nullptr);
    add_contributions(b, m, cut[static_cast<std::size_t>(m.mine)], from, coding, offset,
                      output_begin, afterwards);
  }
}

void direct_all_gather(Builder& b, const Members& m, const std::vector<Span>& shards, Coding coding,
                       const Answers& answers) {
  auto cut = cut_all(b, shards);
  const auto& mine = cut[static_cast<std::size_t>(m.mine)];
  const bool is_encoded = any_encoded(b, m, coding);
  for (std::size_t p = 0; p < mine.size(); ++p) {
    Range code;
    if (is_encoded) {
      code = b.encoding(mine[p]);
      b.encode(code, b.out(mine[p]));
    }
    for (int offset = 1; offset < m.size(); ++offset) {
      Rank peer = m.at(m.mine + offset);
      if (travels_encoded(b, b.me(), peer, coding)) b.send(peer, code, p);
    }
    // This rank, and those who get the elements as they are, end with what the others decode.
    if (is_encoded) b.decode(b.out(mine[p]), code);
    for (int offset = 1; offset < m.size(); ++offset) {
      Rank peer = m.at(m.mine + offset);
      if (travels_encoded(b, b.me(), peer, coding)) continue;
      if (offset == 1 && !answers.empty()) {
        b.send_answer(peer, b.out(mine[p]), answers[p], p);
      } else {
        b.send(peer, b.out(mine[p]), p);
      }
    }
  }
  for (int offset = 1; offset < m.size(); ++offset) {
    Rank peer = m.at(m.mine - offset);
    bool encoded = travels_encoded(b, b.me(), peer, coding);
    const auto& theirs =
        cut[static_cast<std::size_t>(((m.mine - offset) % m.size() + m.size()) % m.size())];
    for (std::size_t p = 0; p < theirs.size(); ++p) {
      if (encoded) {
        b.receive_decode(peer, b.out(theirs[p]), p);
      } else {
        b.receive_sum(peer, b.out(theirs[p]), p);
      }
    }
  }
}

void direct_phase(Builder& b, const Members& m, Span span, From from, Coding coding) {
  auto shards = split(span, static_cast<uint64_t>(m.size()), b.request().dtype);
  Span mine = shards[static_cast<std::size_t>(m.mine)];
  Answers answers;
  direct_reduce_scatter(b, m, shards, from, coding, 0,
                        {any_encoded(b, m, coding) ? nullptr : &answers, nullptr});
  if (answers.empty()) {
    for (Span piece : pieces(b.request(), mine, span.size())) b.finish_sum(b.out(piece));
  }
  direct_all_gather(b, m, shards, coding, answers);
}

void direct_all_reduce(Builder& b) {
  direct_phase(b, node_order(b.request().shape, b.me()), {0, b.request().count}, From::kInput,
               flat_coding(b));
}

}  // namespace paceline::plan
