// The model's interface to the library: attention with any scaling, its gradient, attention against a
// cache, and the attention of single heads on given keys.
#pragma once

#include <span>
#include <ssmax/kv_cache.hpp>
#include <ssmax/rope.hpp>
#include <vector>

#include "configuration.hpp"
#include "parameters.hpp"

namespace longcontext {

// The shape of a matrix of one sequence, [position, 3 · head · channel]: queries, keys and values side by
// side.
struct HeadShape {
  index_t length, heads, head_width;

  index_t width() const { return heads * head_width; }
};

// Writes heads [position, head · channel] and lse, the input of attend_backward, and resizes both. Both
// functions exist for one process (attention_in_one_process.cpp) and for the ranks of MPI
// (attention_over_ranks.cpp); a program links one of the two.
void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Matrix& lse);
// Writes dqkv, and adds to the gradients of the scaling's parameters.
void attend_backward(const HeadShape& shape, const ScalingGradient& scaling, const ssmax::Rope<float>& rope,
                     Matrix& qkv, Matrix& heads, Matrix& lse, Matrix& dheads, Matrix& dqkv);

// Appends the new tokens to the cache, and computes their attention against the cache.
using Cache = ssmax::KvCache<float>;
void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Cache& cache);

// Returns each head's attention on the keys [first_key, first_key + keys), as the mean over the queries
// [first_query, first_query + queries).
std::vector<float> attention_on(const HeadShape& shape, const Scaling& scaling,
                                const ssmax::Rope<float>& rope, Matrix& qkv, index_t first_key, index_t keys,
                                index_t first_query, index_t queries);

}  // namespace longcontext
