// Where the model meets the library: attention with any scaling, its gradient, attention against a cache, and
// how much attention single heads pay to given keys.
#pragma once

#include <span>
#include <ssmax/kv_cache.hpp>
#include <ssmax/rope.hpp>
#include <vector>

#include "configuration.hpp"
#include "parameters.hpp"

namespace longcontext {

// A matrix of one sequence [position, 3 · head · channel] holds queries, keys and values side by side.
struct HeadShape {
  index_t length, heads, head_width;

  index_t width() const { return heads * head_width; }
};

// heads [position, head · channel] and lse, which is for attend_backward, are resized. A program is linked with these two
// in one process or over the ranks of MPI (attention_in_one_process.cpp, attention_over_ranks.cpp).
void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Matrix& lse);
// Writes dqkv, adds to what the scaling gathers.
void attend_backward(const HeadShape& shape, const ScalingGradient& scaling, const ssmax::Rope<float>& rope,
                     Matrix& qkv, Matrix& heads, Matrix& lse, Matrix& dheads, Matrix& dqkv);

// Attention for tokens that continue a sequence, whose past is in the cache; it takes them up.
using Cache = ssmax::KvCache<float>;
void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Cache& cache);

// How much of its attention each head spends on the keys [first_key, first_key + keys), from the queries
// [first_query, first_query + queries), on average.
std::vector<float> attention_on(const HeadShape& shape, const Scaling& scaling,
                                const ssmax::Rope<float>& rope, Matrix& qkv, index_t first_key, index_t keys,
                                index_t first_query, index_t queries);

}  // namespace longcontext
