"""Defects that the library had, as mutants. As a program: checks that each is possible in today's headers."""
import pathlib
import sys

# (file below include/ssmax, text now, text with the defect, commit that fixed it)
HISTORY = [
    ("detail/attention/operands/parts.hpp", "return round_up(d, 2);", "return d;", "aada469"),
    ("detail/attention/operands/parts.hpp", "of.query.head, of.row())", "of.query.head, of.query.index)", "3ee712b"),
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


def past_defects(headers):
    """Yields (file, offset, text now, text with the defect, commit)."""
    for file, before, after, commit in HISTORY:
        text = (headers / file).read_text()
        if text.count(before) != 1:
            sys.exit(f"history.py: {before!r} is {text.count(before)} times in {file}, must be there once")
        yield file, text.index(before), before, after, commit


if __name__ == "__main__":
    print(len(list(past_defects(pathlib.Path(__file__).parents[2] / "include" / "ssmax"))), "past defects are possible")
