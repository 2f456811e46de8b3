// Continues a text: computes the prompt at once, then decodes token by token against a cache in every
// layer.
#pragma once

#include "model.hpp"

namespace longcontext {

// Appends the token with the largest logit. Calls `shown` for every new token.
template <class F>
void continue_text(const Model& model, std::span<const float> weights, const ssmax::Rope<float>& rope,
                   std::span<const index_t> prompt, index_t count, const F& shown) {
  const auto prompt_size = static_cast<index_t>(prompt.size());
  std::vector<Cache> caches = model.caches(prompt_size + count);
  Activations a;
  model.forward(weights, prompt, rope, a, caches);
  for (index_t i = 0; i < count; ++i) {
    index_t likeliest = 0;
    a.logits.row(a.logits.rows() - 1).maxCoeff(&likeliest);
    shown(likeliest);
    if (i + 1 < count) model.forward(weights, std::span(&likeliest, 1), rope, a, caches);
  }
}

}  // namespace longcontext
