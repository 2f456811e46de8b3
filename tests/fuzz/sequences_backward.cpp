// The plan of a backward pass over sequences has the bits of the call, also if the lengths that it was made of change.
#include <ssmax/attention_backward.hpp>
#include <ssmax/plan.hpp>

#include "sequences.hpp"
#include "targets.hpp"

namespace fuzz {

void check_backward_plan(const SequencesCase& c) {
  const index_t entries = c.packed ? 1 : c.sequences(), rows = c.packed ? c.first_row(c.sequences()) : c.rows,
                stored =
                    c.packed ? std::accumulate(c.lengths.begin(), c.lengths.end(), index_t{0}) : c.longest();
  // 1. Draw the tensors. `out` and `lse` need not be those of the forward.
  Random random(c.seed, 2);
  const auto draw = [&](index_t heads, index_t count, index_t width) {
    std::vector<float> numbers(static_cast<std::size_t>(entries * heads * count * width));
    for (float& x : numbers) x = static_cast<float>(random.uniform(-2, 2));
    return numbers;
  };
  const auto view = [&](auto& numbers, index_t heads, index_t count, index_t width) {
    return View<std::remove_pointer_t<decltype(numbers.data())>, 4>(numbers.data(),
                                                                    {entries, heads, count, width});
  };
  const std::vector<float> q = draw(c.heads, rows, c.d), k = draw(c.kv_heads, stored, c.d),
                           v = draw(c.kv_heads, stored, c.dv), out = draw(c.heads, rows, c.dv),
                           lse = draw(c.heads, rows, 1), dout = draw(c.heads, rows, c.dv);
  struct Gradients {
    std::vector<float> dq, dk, dv;
    bool operator==(const Gradients&) const = default;
  };
  const auto gradients = [&](Gradients& g) {
    return ssmax::AttentionGradients<float>{.dout = view(dout, c.heads, rows, c.dv),
                                            .dq = view(g.dq, c.heads, rows, c.d),
                                            .dk = view(g.dk, c.kv_heads, stored, c.d),
                                            .dv = view(g.dv, c.kv_heads, stored, c.dv)};
  };
  const ssmax::BackwardArguments<float> tensors{
      .q = view(q, c.heads, rows, c.d),
      .k = view(k, c.kv_heads, stored, c.d),
      .v = view(v, c.kv_heads, stored, c.dv),
      .out = view(out, c.heads, rows, c.dv),
      .lse = View<const float, 3>(lse.data(), {entries, c.heads, rows})};
  const std::vector<index_t> numbers = c.numbers(c.queries), keys = c.numbers(c.lengths);
  const RangeMask mask{c.mask.mask.get()};
  for_each_target([&](const std::string& target) {
    // 2. Compare.
    const Gradients zeros{std::vector<float>(q.size()), std::vector<float>(k.size()),
                          std::vector<float>(v.size())};
    Gradients expected = zeros, got = zeros;
    std::vector<index_t> own = numbers;
    auto with_lengths = tensors;
    with_lengths.lengths =
        c.packed ? ssmax::SequenceLengths::packed(own, keys) : ssmax::SequenceLengths::padded(own, keys);
    ssmax::attention_backward(with_lengths, gradients(expected), mask);
    const ssmax::BackwardPlan plan(with_lengths, gradients(got), c.executor.threads, mask);
    std::vector<std::byte> memory(plan.bytes() + 64);
    const auto first = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    for (std::size_t i = 0; i < own.size(); ++i) own[i] = std::min(c.numbers(c.refilled)[i], numbers[i]);
    plan.bind(tensors, gradients(got)).run(std::span(memory).subspan(first, plan.bytes()), c.executor);
    if (!(got == expected)) throw Finding(target + ", plan of the backward: other bits than the call");
  });
}

}  // namespace fuzz
