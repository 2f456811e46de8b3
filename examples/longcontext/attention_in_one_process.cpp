// Attention of training in one process. attention_over_ranks.cpp computes the same over MPI.
#include <ssmax/attention_backward.hpp>

#include "attention_views.hpp"

namespace longcontext {

void attend(const HeadShape& shape, const Scaling& scaling, const ssmax::Rope<float>& rope, Matrix& qkv,
            Matrix& heads, Matrix& lse) {
  heads.resize(qkv.rows(), shape.width());
  lse.resize(shape.heads, shape.length);
  const auto attend_with = [&](const auto& with) {
    ssmax::attention({.q = by_heads(qkv, shape, 0),
                      .k = by_heads(qkv, shape, shape.width()),
                      .v = by_heads(qkv, shape, 2 * shape.width()),
                      .out = by_heads(heads, shape, 0),
                      .lse = lse_view(lse, shape),
                      .rope = &rope},
                     with, ssmax::Causal{});
  };
  std::visit(attend_with, scaling);
}

void attend_backward(const HeadShape& shape, const ScalingGradient& scaling, const ssmax::Rope<float>& rope,
                     Matrix& qkv, Matrix& heads, Matrix& lse, Matrix& dheads, Matrix& dqkv) {
  dqkv.resize(qkv.rows(), qkv.cols());
  const auto attend_with = [&](const auto& with) {
    ssmax::attention_backward({.q = by_heads(qkv, shape, 0),
                               .k = by_heads(qkv, shape, shape.width()),
                               .v = by_heads(qkv, shape, 2 * shape.width()),
                               .out = by_heads(heads, shape, 0),
                               .lse = lse_view(lse, shape),
                               .rope = &rope},
                              {.dout = by_heads(dheads, shape, 0),
                               .dq = by_heads(dqkv, shape, 0),
                               .dk = by_heads(dqkv, shape, shape.width()),
                               .dv = by_heads(dqkv, shape, 2 * shape.width())},
                              with, ssmax::Causal{});
  };
  std::visit(attend_with, scaling);
}

}  // namespace longcontext
