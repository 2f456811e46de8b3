#include "attention_layer.hpp"

#include <ssmax/attention.hpp>

#include "attention_views.hpp"

namespace longcontext {

void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Cache& cache) {
  heads.resize(qkv.rows(), shape.width());
  cache.append(by_heads(qkv, shape, shape.width()), by_heads(qkv, shape, 2 * shape.width()), &rope);
  const auto attend_with = [&](const auto& with) {
    ssmax::attention(
        {.q = by_heads(qkv, shape, 0), .keys = cache, .out = by_heads(heads, shape, 0), .rope = &rope}, with,
        ssmax::Causal{});
  };
  std::visit(attend_with, scaling);
}

// Uses values that are 1 at the given keys and 0 elsewhere, so out is the attention on these keys. Passes
// only the keys up to the last query, because queries are aligned with the last key.
std::vector<float> attention_on(const HeadShape& shape, const Scaling& scaling,
                                const ssmax::Rope<float>& rope, Matrix& qkv, index_t first_key, index_t keys,
                                index_t first_query, index_t queries) {
  const index_t seen = first_query + queries;
  const HeadShape asked{.length = queries, .heads = shape.heads, .head_width = shape.head_width};
  const HeadShape all{.length = seen, .heads = shape.heads, .head_width = shape.head_width};
  std::vector<float> marks(static_cast<std::size_t>(seen)),
      parts(static_cast<std::size_t>(shape.heads * queries));
  std::fill_n(marks.begin() + first_key, keys, 1.0f);

  using ssmax::View;
  const View<float, 4> q = by_heads(qkv, asked, first_query * qkv.cols());
  const View<float, 4> v(marks.data(), {1, shape.heads, seen, 1}, {0, 0, 1, 1});
  const View<float, 4> out(parts.data(), {1, shape.heads, queries, 1});
  const auto attend_with = [&](const auto& with) {
    ssmax::attention({.q = q, .k = by_heads(qkv, all, shape.width()), .v = v, .out = out, .rope = &rope},
                     with, ssmax::Causal{});
  };
  std::visit(attend_with, scaling);

  std::vector<float> mean(static_cast<std::size_t>(shape.heads));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    mean[i / static_cast<std::size_t>(queries)] += parts[i] / static_cast<float>(queries);
  }
  return mean;
}

}  // namespace longcontext
