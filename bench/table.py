#!/usr/bin/env python3
"""Reads the JSON of a benchmark run and prints Markdown tables of medians with their spread, and a table of requirements.

  ssmax_bench --benchmark_enable_random_interleaving=true --benchmark_repetitions=9 \\
              --benchmark_report_aggregates_only=false --benchmark_out=run.json
  table.py run.json

Every figure is a median over the repetitions. The small print gives the lower and the upper quartile. With --check, the
exit status is 1 if a requirement fails.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict

OURS = ("softmax", "ssmax", "ssmax_bias", "ssmax_rope", "ssmax_rope_rounded", "softmax_rope",
        "softmax_native", "ssmax_paged", "rope_half", "rope_interleaved")
# Peers of the requirements. The tables also show the *_native peers, which need a compiler flag.
PRODUCTS = ("naive", "eigen", "onednn", "torch")


class Run:
    """The repetitions of each benchmark: name -> counter -> values."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        self.context = data["context"]
        self.errors = {}
        self.labels = {}
        self.values = defaultdict(lambda: defaultdict(list))
        for entry in data["benchmarks"]:
            if entry.get("run_type") == "aggregate":
                continue
            name = entry["name"].removesuffix("/real_time")
            if entry.get("error_occurred"):
                self.errors[name] = entry["error_message"]
                continue
            self.labels[name] = entry.get("label", "")
            for counter in ("ns_per_element", "GFLOPS", "bytes_per_second", "error"):
                if counter in entry:
                    self.values[name][counter].append(entry[counter])

    def median(self, name, counter="ns_per_element"):
        values = self.values[name][counter] if name in self.values else []
        return statistics.median(values) if values else None

    def quartiles(self, name, counter="ns_per_element"):
        values = self.values[name][counter]
        if len(values) < 2:
            return values[0], values[0]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, high

    def family(self, family):
        """Returns name of implementation -> shapes, with the library first and the copy last."""
        table = defaultdict(list)
        for name in self.values:
            parts = name.split("/")
            if parts[0] == family:
                table[parts[1]].append(parts[2])
        return {name: table[name] for name in sorted(table, key=implementation_order)}


def implementation_order(name):
    return (OURS.index(name) if name in OURS else len(OURS), name == "copy", name)


def shape_order(shape):
    """Returns the sort key of a shape: small blocks before large blocks, short rows before long rows."""
    if "x" not in shape:
        return (0, 0, shape)
    rows, n = map(int, shape.split("x"))
    return (rows * n > 1 << 21, n, shape)


def print_context(run):
    context = run.context
    repetitions = max((len(v) for counters in run.values.values() for v in counters.values()), default=0)
    print(f"{context.get('cpu', 'unknown CPU')}, {context['num_cpus']} cores, "
          f"target `{context.get('ssmax target', '?')}`; medians of {repetitions} repetitions, quartiles below.\n")
    print("Peers: " + "; ".join(f"{key.removeprefix('peer ')} {value}" for key, value in sorted(context.items())
                                if key.startswith("peer ")) + "\n")


def print_limits(run):
    names = [name for name in run.values if name.startswith("limit/")]
    if not names:
        return
    print("| limit | 1 thread | 2 threads |\n|---|---|---|")
    kinds = sorted({name.removeprefix("limit/").rsplit("_t", 1)[0] for name in names})
    for kind in kinds:
        cells = []
        for threads in (1, 2):
            name = f"limit/{kind}_t{threads}"
            counter, unit, scale = ("GFLOPS", "GFLOP/s", 1) if kind == "fma" else ("bytes_per_second", "GB/s", 1e9)
            if run.median(name, counter) is None:
                cells.append("")
                continue
            low, high = (value / scale for value in run.quartiles(name, counter))
            cells.append(f"{run.median(name, counter) / scale:.1f} {unit} <sub>{low:.1f}–{high:.1f}</sub>")
        print(f"| {kind} | " + " | ".join(cells) + " |")
    print()


def print_family(run, family, ours):
    """Prints nanoseconds per element and, in brackets, how many times as fast `ours` is."""
    table = run.family(family)
    if not table:
        return
    shapes = sorted({shape for shapes in table.values() for shape in shapes}, key=shape_order)
    print(f"### `{family}`: ns per element (in brackets: how many times as fast `{ours}` is)\n")
    print("| | " + " | ".join(shapes) + " |\n|---" + "|---" * len(shapes) + "|")
    for implementation in table:
        cells = []
        for shape in shapes:
            name = f"{family}/{implementation}/{shape}"
            value = run.median(name)
            if value is None:
                cells.append("")
                continue
            low, high = run.quartiles(name)
            own = run.median(f"{family}/{ours}/{shape}")
            ratio = f" ({value / own:.2f}×)" if own and implementation not in OURS else ""
            cells.append(f"{value:.3f}{ratio} <sub>{low:.3f}–{high:.3f}</sub>")
        label = f"**{implementation}**" if implementation in OURS else implementation
        print(f"| {label} | " + " | ".join(cells) + " |")
    print()


def print_accuracy(run):
    shapes = ("1x65536", "1x1048576")
    names = [name for name in run.family("rows") if name != "copy"]
    if not names:
        return
    print("### Largest relative error of one probability\n")
    print("| | " + " | ".join(shapes) + " |\n|---" + "|---" * len(shapes) + "|")
    for implementation in names:
        cells = [run.median(f"rows/{implementation}/{shape}", "error") for shape in shapes]
        print(f"| {implementation} | " + " | ".join("" if cell is None else f"{cell:.1e}" for cell in cells) + " |")
    print()


class Attention:
    """The fields of the third part of an attention benchmark's name. Decode has no mask."""

    PATTERN = re.compile(r"h(\d+)_kv(\d+)_d(\d+)_n(\d+)_(?:(full|causal|w\d+)_)?(f32|bf16|f16)_t(\d+)")

    def __init__(self, shape):
        heads, kv_heads, width, n, self.mask, self.type, threads = self.PATTERN.fullmatch(shape).groups()
        self.shape = shape
        self.heads, self.kv_heads, self.width, self.n, self.threads = map(int, (heads, kv_heads, width, n, threads))

    def group(self):
        """Returns the fields that are equal within a table: all except n."""
        return self.threads, self.heads, self.kv_heads, self.width, self.mask or "", self.type

    def title(self):
        parts = [f"{self.heads} heads", f"{self.kv_heads} kv heads", f"d {self.width}", self.mask, self.type,
                 f"{self.threads} thread" + ("s" if self.threads > 1 else "")]
        return ", ".join(part for part in parts if part)

    def cache_bytes(self):
        return 2 * self.kv_heads * self.n * self.width * (4 if self.type == "f32" else 2)

    def read_limit(self, context):
        """Returns the limit of reading the keys and values: the cache if they fill at most half of it, else memory."""
        l3 = max((cache["size"] for cache in context.get("caches", []) if cache["level"] == 3), default=0)
        return f"limit/read_{'l3' if self.cache_bytes() <= l3 / 2 else 'mem'}_t{self.threads}"


def attention_shapes(run, family):
    shapes = {shape for shapes in run.family(family).values() for shape in shapes}
    return sorted(map(Attention, shapes), key=lambda a: (a.group(), a.n))


def print_attention(run, family, counter, unit, scale, limit_of):
    """Prints one table per group of shapes, with n as columns. Brackets give the percentage of `limit_of` the shape."""
    shapes = attention_shapes(run, family)
    for group in sorted({a.group() for a in shapes}):
        columns = [a for a in shapes if a.group() == group]
        print(f"### `{family}`: {columns[0].title()}; {unit} (of the limit)\n")
        print("| | " + " | ".join(f"n {a.n}, {limit_of(a).removeprefix('limit/')}" for a in columns) +
              " |\n|---" + "|---" * len(columns) + "|")
        for implementation in run.family(family):
            names = [f"{family}/{implementation}/{a.shape}" for a in columns]
            if not any(name in run.values for name in names):
                continue
            cells = []
            for a, name in zip(columns, names):
                value = run.median(name, counter)
                if value is None:
                    cells.append("")
                    continue
                low, high = (quartile / scale for quartile in run.quartiles(name, counter))
                limit = run.median(limit_of(a), counter)
                share = f" ({100 * value / limit:.0f} %)" if limit else ""
                cells.append(f"{value / scale:.1f}{share} <sub>{low:.1f}–{high:.1f}</sub>")
            row = f"**{implementation}**" if implementation in OURS else implementation
            ways = sorted({run.labels[name] for name in names if run.labels.get(name)})
            print(f"| {row} <sub>{'; '.join(ways)}</sub> | " + " | ".join(cells) + " |")
        print()


class Goals:
    """Requirements: name, measured value, bound, result. The result is empty if the run has no such figure."""

    def __init__(self):
        self.lines = []

    def at_least(self, what, value, bound, unit="×"):
        self.add(what, value, bound, unit, "≥", lambda a, b: a >= b)

    def at_most(self, what, value, bound, unit="×"):
        self.add(what, value, bound, unit, "≤", lambda a, b: a <= b)

    def add(self, what, value, bound, unit, sign, holds):
        ok = None if value is None or bound is None else holds(value, bound)
        self.lines.append((what, value, bound, unit, sign, ok))

    def show(self):
        print("### Requirements\n\n| requirement | measured | required | |\n|---|---|---|---|")
        for what, value, bound, unit, sign, ok in self.lines:
            measured = "not in this run" if value is None else f"{value:.3g}{unit}"
            wanted = "?" if bound is None else f"{sign} {bound:.3g}{unit}"
            print(f"| {what} | {measured} | {wanted} | {'' if ok is None else 'pass' if ok else '**FAIL**'} |")
        print()

    def all_hold(self):
        return all(ok is not False for *_, ok in self.lines)


def ratio(a, b):
    return None if a is None or b is None else a / b


def percentage(a, b):
    return None if a is None or not b else 100 * a / b


def check_prefill(run, goals):
    def rate(implementation, a, threads=None):
        shape = a.shape if threads is None else a.shape.removesuffix(f"_t{a.threads}") + f"_t{threads}"
        return run.median(f"prefill/{implementation}/{shape}", "GFLOPS")

    peak = {threads: run.median(f"limit/fma_t{threads}", "GFLOPS") for threads in (1, 2)}
    for a in attention_shapes(run, "prefill"):
        own = rate("softmax", a)
        if a.threads == 2:
            if a.n >= 2048:
                gain = ratio(peak[2], peak[1])
                goals.at_least(f"prefill {a.shape}: gain over one thread", ratio(own, rate("softmax", a, 1)),
                               None if gain is None else 0.97 * gain)
            continue
        bound = None
        if a.mask == "full" and a.n >= 1024:
            bound = 87 if a.width == 64 else 91
        elif a.mask == "causal" and a.n >= 2048:
            bound = 84 if a.width == 64 else 88
        elif a.mask == "causal" and a.n == 1024:
            bound = 80 if a.width == 64 else 85
        if bound is not None:
            goals.at_least(f"prefill {a.shape} of the FMA peak", percentage(own, peak[1]), bound, " %")
        goals.at_least(f"prefill {a.shape} against onednn_tile", ratio(own, rate("onednn_tile", a)),
                       1.25 if a.mask == "causal" and a.n == 512 else 1.08)
        if a.mask in ("full", "causal"):
            goals.at_least(f"prefill {a.shape} against torch", ratio(own, rate("torch", a)), 1.1)
        else:
            full = Attention(a.shape.replace(a.mask, "full"))
            goals.at_most(f"prefill {a.shape}: time of a visible logit against full",
                          ratio(rate("softmax", full), own), 1.15)
        for name, most in (("ssmax", 1.01), ("softmax_rope", 1.03), ("ssmax_rope", 1.03)):
            if a.n in (2048, 4096):
                goals.at_most(f"prefill {a.shape}: time of {name} against softmax", ratio(own, rate(name, a)), most)


def check_decode(run, goals):
    for a in attention_shapes(run, "decode"):
        if a.threads != 1:
            continue
        own = run.median(f"decode/softmax/{a.shape}", "bytes_per_second")
        limit = a.read_limit(run.context)
        in_memory = limit.startswith("limit/read_mem")
        if a.kv_heads == a.heads:
            # With one kv head per head, only reading from memory has a requirement.
            bound = None if a.n < 32768 or not in_memory else 92 if a.type == "f32" else 80
        else:
            bound = 65 if a.type == "f32" else 50
        if bound is not None:
            goals.at_least(f"decode {a.shape} of {limit.removeprefix('limit/')}",
                           percentage(own, run.median(limit, "bytes_per_second")), bound, " %")
        if a.kv_heads < a.heads and a.type == "f32":
            goals.at_least(f"decode {a.shape} against torch",
                           ratio(own, run.median(f"decode/torch/{a.shape}", "bytes_per_second")), 2.5)


def check(run):
    goals = Goals()
    for shape, bound in (("4096x16", 3.0), ("1024x64", 1.6), ("256x256", 1.8)):
        own = run.median(f"rows/softmax/{shape}")
        found = {peer: run.median(f"rows/{peer}/{shape}") for peer in PRODUCTS}
        found = {peer: value for peer, value in found.items() if value is not None}
        best = min(found, key=found.get, default=None)
        goals.at_least(f"rows {shape} against the best of {', '.join(PRODUCTS)} ({best})",
                       ratio(found.get(best), own), bound)
    gflops = run.median("limit/fma_t1", "GFLOPS")
    for shape in ("64x1024", "16x4096", "1x65536"):
        own = run.median(f"rows/softmax/{shape}")
        goals.at_least(f"rows {shape} against onednn", ratio(run.median(f"rows/onednn/{shape}"), own), 1.9)
        bound = 0.36 * 102 / gflops if gflops else None
        goals.at_most(f"rows {shape}, 0.36 ns × (102 / FMA GFLOP/s)", own, bound, " ns")
    for shape in ("16384x1024", "16x1048576"):
        own = run.median(f"rows/softmax/{shape}")
        goals.at_most(f"rows {shape} from memory against a streaming copy",
                      ratio(own, run.median(f"rows/copy/{shape}")), 1.3)
    for shape in sorted(run.family("rows").get("softmax", []), key=shape_order):
        if shape == "4096x16":
            continue  # the requirement begins at n = 64
        for name in ("ssmax", "ssmax_bias"):
            goals.at_most(f"rows {shape}: {name} against softmax",
                          ratio(run.median(f"rows/{name}/{shape}"), run.median(f"rows/softmax/{shape}")), 1.02)
    own = run.median("rows_backward/softmax/64x1024")
    goals.at_most("rows_backward 64x1024 against a copy of its three arrays",
                  ratio(own, run.median("rows_backward/copy/64x1024")), 1.6)
    goals.at_least("rows_backward 64x1024 against torch", ratio(run.median("rows_backward/torch/64x1024"), own), 1.0)
    for shape in sorted(run.family("rows").get("softmax_native", []), key=shape_order):
        goals.at_most(f"rows {shape}: no flag against -march=native",
                      ratio(run.median(f"rows/softmax/{shape}"), run.median(f"rows/softmax_native/{shape}")), 1.03)
    for shape in ("1x1048576", "16x1048576"):
        goals.at_most(f"rows {shape}: largest relative error", run.median(f"rows/softmax/{shape}", "error"), 5e-7, "")
    check_prefill(run, goals)
    check_decode(run, goals)
    goals.show()
    return goals.all_hold()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the file that --benchmark_out wrote")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a requirement fails")
    arguments = parser.parse_args()
    run = Run(arguments.run)
    print_context(run)
    print_limits(run)
    print_family(run, "rows", "softmax")
    print_accuracy(run)
    print_family(run, "rows_backward", "softmax")
    print_family(run, "rope", "rope_half")
    print_attention(run, "prefill", "GFLOPS", "GFLOP/s", 1, lambda a: f"limit/fma_t{a.threads}")
    print_attention(run, "backward", "GFLOPS", "GFLOP/s", 1, lambda a: f"limit/fma_t{a.threads}")
    print_attention(run, "decode", "bytes_per_second", "GB/s", 1e9, lambda a: a.read_limit(run.context))
    for name, message in run.errors.items():
        print(f"{name}: {message}\n")
    holds = check(run)
    return 1 if arguments.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
