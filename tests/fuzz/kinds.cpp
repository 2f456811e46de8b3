#include "kinds.hpp"

namespace fuzz {
namespace {

template <Call call>
void run_attention_kind(Random& random, const Options& options, std::string& words) {
  const AttentionCase c = draw_attention(random, call, options);
  words = c.words();
  check_attention(c);
}

constexpr Kind kinds[] = {{"rows", 6, run_rows},
                          {"cross_entropy", 1, run_cross_entropy},
                          {"errors", 1, run_errors},
                          {"attention", 5, run_attention_kind<Call::attention>},
                          {"partial", 1, run_attention_kind<Call::partial>},
                          {"decode", 2, run_attention_kind<Call::decode>},
                          {"backward", 3, run_attention_kind<Call::backward>},
                          {"sequences", 2, run_sequences},
                          {"runs", 1, run_runs}};

}  // namespace

const Kind& draw_kind(Random& random) {
  int shares = 0;
  for (const Kind& kind : kinds) shares += kind.share;
  auto at = static_cast<int>(random.between(0, shares - 1));
  for (const Kind& kind : kinds) {
    if (at < kind.share) return kind;
    at -= kind.share;
  }
  return kinds[0];
}

}  // namespace fuzz
