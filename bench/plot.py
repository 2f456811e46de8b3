#!/usr/bin/env python3
"""Draws the speed of prefill against n from the JSON of a benchmark run, by gnuplot.

  plot.py run.json docs/prefill.png
  plot.py run.json docs/speed.png --panel causal 64

The picture shows medians of one thread and float. Full and causal are side by side, with one row per head width. With
--panel, it shows one mask and one head width. The dashed line is the FMA peak.
"""

import argparse
import subprocess

from table import Run, attention_shapes

# name -> color and title, in the order of drawing
CURVES = {
    "softmax": ("#c03030", "ssmax (Softmax)"),
    "ssmax": ("#e89020", "ssmax (SSMax)"),
    "ssmax_rope": ("#e89020", "ssmax (SSMax and rope)"),
    "onednn_tile": ("#2060b0", "tiles over oneDNN"),
    "onednn": ("#60a0e0", "oneDNN, unfused"),
    "torch": ("#30a060", "PyTorch"),
    "eigen_native": ("#907090", "Eigen -march=native"),
    "eigen": ("#b0b0b0", "Eigen"),
}


def points(run, implementation, shapes):
    found = [(a.n, run.median(f"prefill/{implementation}/{a.shape}", "GFLOPS")) for a in shapes]
    return [(n, value) for n, value in found if value is not None]


def panel(run, shapes, mask, width, number):
    """Returns gnuplot's commands for one of the four pictures."""
    chosen = [a for a in shapes if (a.mask, a.width) == (mask, width)]
    if not chosen:
        return []
    lines, plots = [], []
    peak = run.median("limit/fma_t1", "GFLOPS")
    if peak is not None:
        plots.append(f"{peak} with lines dashtype 2 linewidth 2 linecolor rgb '#404040' title 'FMA peak'")
    for name, (colour, title) in CURVES.items():
        values = points(run, name, chosen)
        if not values:
            continue
        block = f"$panel{number}_{name}"
        lines += [f"{block} << END", *(f"{n} {value}" for n, value in values), "END"]
        plots.append(f"{block} with linespoints pointtype 7 pointsize 0.8 linewidth 2 linecolor rgb '{colour}' "
                     f"title '{title}'")
    lines.append(f"set title '{mask}, {chosen[0].heads} heads of width {width}' font ',14'")
    return lines + ["plot " + ", \\\n     ".join(plots)]


def script(run, output, only=None):
    shapes = [a for a in attention_shapes(run, "prefill") if a.threads == 1 and a.type == "f32"]
    sizes = sorted({a.n for a in shapes})
    peak = run.median("limit/fma_t1", "GFLOPS") or 0
    top = 1.05 * max([peak] + [value for name in CURVES for _, value in points(run, name, shapes)])
    layout = "1,1 margins 0.08,0.98,0.24,0.92" if only else "2,2 margins 0.06,0.98,0.13,0.95 spacing 0.07,0.11"
    lines = [
        f"set terminal pngcairo size {'1000,560' if only else '1300,1000'} font 'Sans,12'",
        f"set output '{output}'",
        f"set multiplot layout {layout}",
        "set logscale x 2",
        f"set xtics ({', '.join(map(str, sizes))})",
        f"set xrange [{0.9 * sizes[0]}:{1.1 * sizes[-1]}]",
        f"set yrange [0:{top}]",
        "set xlabel 'n'",
        "set ylabel 'GFLOP/s, one thread'",
        "set grid linecolor rgb '#d8d8d8' linetype 1",
        "set border 3",
        "set tics nomirror",
        "unset key",  # the last picture has the legend of all
    ]
    panels = [only] if only else [(mask, width) for width in sorted({a.width for a in shapes}) for mask in ("full", "causal")]
    for number, (mask, width) in enumerate(panels):
        if number == len(panels) - 1:
            place = "0.5,0.06 center vertical maxrows 3" if only else "0.5,0.035 center vertical maxrows 2"
            lines.append(f"set key at screen {place} Left reverse width -3")
        lines += panel(run, shapes, mask, width, number)
    return "\n".join(lines + ["unset multiplot", ""])


def draw(run, output, only=None):
    subprocess.run(["gnuplot"], input=script(run, output, only), text=True, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the file that --benchmark_out wrote")
    parser.add_argument("output", help="the picture")
    parser.add_argument("--panel", nargs=2, metavar=("MASK", "WIDTH"), help="draw one mask and one head width")
    arguments = parser.parse_args()
    only = (arguments.panel[0], int(arguments.panel[1])) if arguments.panel else None
    draw(Run(arguments.run), arguments.output, only)


if __name__ == "__main__":
    main()
