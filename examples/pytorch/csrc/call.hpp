// What every call has in common, whatever it does: extents, options, arguments of the library.
#pragma once

#include <ssmax/attention.hpp>

#include "policies.hpp"

namespace ssmax_torch {

template <class T>
using Compute = ssmax::detail::Compute<T>;

/// Checks that query, key and value fit each other; returns [batch, heads, queries, keys].
std::array<index_t, 4> check_inputs(const Tensor& query, const Tensor& key, const Tensor& value);

/// A call's options, and what they point at.
template <class T>
struct Options {
  /// A position is the last key's at most.
  Options(const Arguments& a, index_t heads, index_t keys) {
    const index_t first = rope_key_position(a.rope);
    if (first < 0 || first > ssmax::detail::most_counted - keys) {
      fail("rope has " + std::to_string(first) + " for the position of the first key");
    }
    rope = rope_tables<Compute<T>>(a.rope, first + keys);
    if (a.sinks) {
      check_shape("sinks", *a.sinks, std::array{heads});
      for (double sink : doubles("sinks", *a.sinks)) sinks.push_back(static_cast<Compute<T>>(sink));
    }
    options.scale = a.scale;
    options.rope = rope.get();
    options.key_position = first;
    options.sinks = sinks;
  }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  std::shared_ptr<const ssmax::Rope<Compute<T>>> rope;
  std::vector<Compute<T>> sinks;
  ssmax::AttentionOptions<T> options;
};

}  // namespace ssmax_torch
