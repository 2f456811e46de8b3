#!/usr/bin/env python3
"""Measures this processor and writes its column in docs/benchmarks.md.

  measure.py measure --bench build/measure/bench/ssmax_bench    runs the rows of FILTER, writes
                                                                docs/benchmarks/<processor>.json, its plot and all tables
  measure.py tables                                             writes the tables from the existing files
  measure.py check                                              exits with 1 if the tables differ from the files

The environment variable SSMAX_PROCESSOR_NAME gives the name of the processor. The default is the name from the operating
system.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import plot
from table import Run

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- made by bench/measure.py: begin -->\n", "<!-- made by bench/measure.py: end -->\n"

# The benchmarks of a run: limits, rows, and those of attention whose nine repetitions take minutes.
FILTER = "|".join((
    r"^limit/(fma|dot_bf16|amx_bf16|read_l3|read_mem)_t",
    r"^rows/(softmax|ssmax|onednn|torch|eigen_native|naive|copy)/(1024x64|64x1024|1x65536|16384x1024)/",
    r"^rows_backward/(softmax|onednn|torch|copy)/(1024x64|64x1024|16384x1024)/",
    r"^prefill/(softmax|ssmax_rope|onednn_tile|torch|onednn|eigen_native)/.*_n(512|1024|2048|4096)_(full|causal)_f32_t1",
    r"^backward/(softmax|onednn_tile|torch)/.*_d64_n(512|1024|2048)_causal_f32_t1",
    r"^prefill/(softmax|ssmax_rope|ssmax_rope_rounded|torch)/.*_n2048_(full|causal)_bf16_t1",
    r"^decode/(softmax|onednn|torch)/.*_d64_n(1024|32768)_(f32|bf16)_t1",
    r"^decode/(softmax|onednn|torch)/h32_kv8_d128_n(1024|32768)_(f32|bf16)_t1",
))

# counter of a family -> unit, counts per unit, decimals, True if less is better
UNITS = {
    "ns_per_element": ("ns per element", 1, 3, True),
    "GFLOPS": ("GFLOP/s", 1, 0, False),
    "bytes_per_second": ("GB/s", 1e9, 0, False),
}

NAMES = {"softmax": "`Softmax`", "ssmax": "`SSMax`", "ssmax_rope": "`SSMax` and rope",
         "ssmax_rope_rounded": "`SSMax` and rope, `rounded_rotation`", "onednn": "oneDNN, unfused",
         "onednn_tile": "tiles over oneDNN", "torch": "PyTorch", "eigen_native": "Eigen, -march=native",
         "naive": "loop, -O3"}

TITLES = {"limit": "The machine's limits", "rows": "Rows", "rows_backward": "Rows, backward",
          "prefill": "Attention", "backward": "Attention, backward", "decode": "Decoding"}


# ---- The processor. ----------------------------------------------------------------------------------------------

# vendor and family -> (first model, architecture), sorted by model: the last entry with first model <= model applies
ARCHITECTURES = {
    ("AuthenticAMD", 23): ((0x00, "Zen"), (0x08, "Zen+"), (0x11, "Zen"), (0x18, "Zen+"), (0x20, "Zen"), (0x30, "Zen 2")),
    ("AuthenticAMD", 25): ((0x00, "Zen 3"), (0x10, "Zen 4"), (0x20, "Zen 3"), (0x60, "Zen 4")),
    ("AuthenticAMD", 26): ((0x00, "Zen 5"),),
}


def cpuinfo():
    """Returns the fields of the first processor, or an empty dictionary without /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def processor_name(info):
    if os.environ.get("SSMAX_PROCESSOR_NAME"):
        return os.environ["SSMAX_PROCESSOR_NAME"]
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in info:
        return name
    models = ARCHITECTURES.get((info["vendor_id"], int(info["cpu family"])), ())
    found = [architecture for first, architecture in models if first <= int(info["model"])]
    return f"{name} ({found[-1]})" if found else name


# ---- A run and its summary. ---------------------------------------------------------------------------------------

def summary(run, repetitions, compiler, version):
    info = cpuinfo()
    rows = {}
    for name, counters in sorted(run.values.items()):
        counter = next((c for c in UNITS if counters.get(c)), None)
        if counter:
            less = UNITS[counter][3]
            rows[name] = {"counter": counter, "median": float(f"{run.median(name, counter):.5g}"),
                          "best": float(f"{(min if less else max)(counters[counter]):.5g}")}
    return {
        "processor": processor_name(info),
        "virtual_machine": "hypervisor" in info.get("flags", "").split(),
        "cores": os.cpu_count(),
        "threads": 1,
        "target": run.context.get("ssmax target", "?"),
        "date": datetime.date.today().isoformat(),
        "version": version,
        "compiler": compiler,
        "repetitions": repetitions,
        "peers": {key.removeprefix("peer "): value for key, value in sorted(run.context.items())
                  if key.startswith("peer ") and not value.startswith("missing")},
        "rows": rows,
    }


def measure(arguments):
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/run.json"
        subprocess.run([arguments.bench, f"--benchmark_filter={arguments.filter}", "--benchmark_min_time=0.02",
                        "--benchmark_enable_random_interleaving=true", f"--benchmark_repetitions={arguments.repetitions}",
                        "--benchmark_report_aggregates_only=false", f"--benchmark_out={file}"], check=True)
        run = Run(file)
    result = summary(run, arguments.repetitions, arguments.compiler, arguments.version)
    slug = re.sub(r"[^a-z0-9]+", "-", result["processor"].lower()).strip("-")
    folder = arguments.docs / "benchmarks"
    folder.mkdir(exist_ok=True)
    (folder / f"{slug}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if run.family("prefill"):
        plot.draw(run, folder / f"{slug}.png")
    print(f"{result['processor']}: {folder / slug}.json")
    return write_tables(arguments)


# ---- The tables. -------------------------------------------------------------------------------------------------

def cell(row):
    """Returns the median and, where it differs, the best repetition in brackets."""
    if row is None:
        return ""
    _, scale, decimals, _ = UNITS[row["counter"]]
    median, best = (f"{row[key] / scale:.{decimals}f}" for key in ("median", "best"))
    return median if median == best else f"{median} ({best})"


def shape(text):
    """Returns the third part of a row's name as text."""
    match = re.fullmatch(r"h(\d+)_kv(\d+)_d(\d+)_n(\d+)_(?:(full|causal)_)?(f32|bf16)_t1", text)
    if not match:
        return text.replace("x", " × ")
    heads, kv_heads, width, n, mask, type_name = match.groups()
    kv = f", {kv_heads} kv heads" if kv_heads != heads else ""
    parts = ("bfloat16" if type_name == "bf16" else "", mask, f"{heads} heads{kv} of width {width}", f"n {n}")
    return ", ".join(part for part in parts if part)


def in_order(name):
    """Returns the sort key of a row: shapes together, numbers by size, the library before its peers."""
    family, implementation, *rest = name.split("/")
    numbers = re.split(r"(\d+)", rest[0] if rest else "")
    key = [(int(part), "") if part.isdigit() else (-1, part) for part in numbers]
    return (list(TITLES).index(family), "bf16" in name, "causal" in name, key,
            list(NAMES).index(implementation) if implementation in NAMES else len(NAMES), implementation)


def label(name):
    family, implementation, *rest = name.split("/")
    if family == "limit":
        kind, _, threads = implementation.rpartition("_t")
        what = {"fma": "float FMA", "dot_bf16": "pair dots of bfloat16", "amx_bf16": "AMX tiles of bfloat16",
                "read_l3": "read from the last-level cache", "read_mem": "read from memory"}[kind]
        return f"{what}, {threads} thread{'s' if threads != '1' else ''}"
    return f"{shape(rest[0])}: {NAMES.get(implementation, implementation)}"


def tables(folder):
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return "No processor has been measured by this command yet.\n"
    results = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    lines = ["| processor | target | measured | repetitions | compiler | version | peers |", "|---|---|---|---|---|---|---|"]
    for result in results.values():
        machine = f"{result['cores']} cores" + (", a virtual machine" if result["virtual_machine"] else "")
        peers = "; ".join(f"{name} {version}" for name, version in result["peers"].items())
        lines.append(f"| {result['processor']}, {machine} | {result['target']} | {result['date']} | {result['repetitions']} "
                     f"| {result['compiler']} | {result['version']} | {peers} |")
    names = {name for result in results.values() for name in result["rows"]}
    for family, title in TITLES.items():
        chosen = sorted((name for name in names if name.startswith(f"{family}/")), key=in_order)
        counters = {result["rows"][name]["counter"] for result in results.values() for name in chosen
                    if name in result["rows"]}
        for counter in UNITS:
            if counter not in counters:
                continue
            rows = [name for name in chosen
                    if any(r["rows"].get(name, {}).get("counter") == counter for r in results.values())]
            lines += ["", f"| {title}, {UNITS[counter][0]} | " + " | ".join(r["processor"] for r in results.values()) + " |",
                      "|---" * (1 + len(results)) + "|"]
            lines += [f"| {label(name)} | " + " | ".join(cell(r["rows"].get(name)) for r in results.values()) + " |"
                      for name in rows]
    for slug, result in results.items():
        if (folder / f"{slug}.png").exists():
            lines += ["", f"![GFLOP/s of attention against n, {result['processor']}](benchmarks/{slug}.png)"]
    return "\n".join(lines) + "\n"


def replaced(page, text):
    """Returns the page with `text` between the markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit("docs/benchmarks.md must have the two marker lines around the tables")
    return before + BEGIN + "\n" + text + "\n" + END + after


def write_tables(arguments):
    page = arguments.docs / "benchmarks.md"
    page.write_text(replaced(page.read_text(encoding="utf-8"), tables(arguments.docs / "benchmarks")), encoding="utf-8")
    return 0


def check(arguments):
    page = (arguments.docs / "benchmarks.md").read_text(encoding="utf-8")
    if page == replaced(page, tables(arguments.docs / "benchmarks")):
        return 0
    print("The tables of docs/benchmarks.md differ from docs/benchmarks/*.json: run `bench/measure.py tables`.")
    return 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.md")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("measure")
    command.add_argument("--bench", required=True, help="the binary ssmax_bench")
    command.add_argument("--compiler", default="?", help="name and version of the compiler")
    command.add_argument("--version", default="?", help="the library's version")
    command.add_argument("--repetitions", type=int, default=9)
    command.add_argument("--filter", default=FILTER, help="a regular expression of rows")
    command.set_defaults(run=measure)
    commands.add_parser("tables").set_defaults(run=write_tables)
    commands.add_parser("check").set_defaults(run=check)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
