"""Defects that the library had: (file below include/ssmax, text now, text with the defect, commit that fixed it)."""

HISTORY = [
    ("detail/attention/operands/parts.hpp", "return (d + 1) / 2 * 2;", "return d;", "aada469"),
    ("detail/attention/operands/parts.hpp", "of.query.head, of.row)", "of.query.head, of.query.index)", "3ee712b"),
    ("detail/attention/forward/decode.hpp", "cut(hull.any, seen.keys)", "hull.any", "59c15f3"),
    ("detail/attention/operands/prefetch.hpp", "std::clamp<index_t>(keys.size(), 0, max_cached_numbers + 1)", "keys.size()",
     "806fdf6"),
    ("detail/attention/forward/short.hpp", "finite_ == Finite::no || (masks && !values_are_finite())",
     "masks && !values_are_finite()", "7148e11"),
    ("detail/attention/backward/irregular.hpp", "std::min(std::exp2(static_cast<double>(x) - base), 1.0)",
     "std::exp2(static_cast<double>(x) - base)", "67c7d9e"),
    ("detail/attention/desk/check.hpp", "stored.end, \"the length is\", shape.keys", "stored.end, \"the length is\", stored.end",
     "d6c5195"),
    ("mask_runs.hpp", "std::min(next(words, begin, ~std::uint64_t{0}), blocks)", "next(words, begin, ~std::uint64_t{0})",
     "eff3f70"),
]
