// Text that goes on: the prompt at once, then token by token against a cache in every layer.
#pragma once

#include "model.hpp"

namespace longcontext {

// Always the likeliest token; `shown` gets every one as soon as it is known.
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
