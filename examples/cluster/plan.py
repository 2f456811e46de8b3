#!/usr/bin/env python3
"""Runs the example ring, unchanged, on a simulated cluster by SimGrid's SMPI, and draws its efficiency.

  plan.py run <ring_simulated.so> --ranks 8 64 1024 --positions 4194304 --gbit 100 --out runs.csv
  plan.py run <ring_simulated.so> --ranks 8 64 1024 --share 8192 --gbit 25 --out runs.csv
  plan.py plot runs.csv docs/cluster.png

The simulation computes no results. The simulated clock advances by the FLOP of each call at the given rate. Efficiency is
the rate that ring prints, divided by the rate of all ranks together.
"""

import argparse
import csv
import pathlib
import re
import subprocess
import sys
import tempfile

PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="cluster" prefix="node" suffix="" radical="0-{last}" speed="{gflops}Gf" core="{cores}"
           bw="{bytes}GBps" lat="{hop}us" loopback_bw="{bytes}GBps" loopback_lat="{hop}us"
           sharing_policy="SPLITDUPLEX">
    <prop id="backward" value="{backward}"/>
  </cluster>
</platform>
"""
FIELDS = ["positions", "ranks", "gbit", "us", "gflops", "pass", "seconds", "efficiency"]


def simulate(arguments, ranks, positions):
    """Returns ring's output with this number of ranks. Each rank has its own machine unless `cores` is given."""
    nodes = -(-ranks // arguments.node_ranks)
    with tempfile.TemporaryDirectory() as folder:
        platform, hosts = pathlib.Path(folder, "platform.xml"), pathlib.Path(folder, "hosts")
        platform.write_text(PLATFORM.format(last=nodes - 1, gflops=arguments.gflops, cores=arguments.cores,
                                            bytes=arguments.gbit / 8, hop=arguments.us / 2,
                                            backward=arguments.backward))
        hosts.write_text("".join(f"node{i // arguments.node_ranks}\n" for i in range(ranks)))
        command = ["smpirun", "-no-privatize", "-platform", platform, "-hostfile", hosts, "-np", str(ranks),
                   "--cfg=smpi/simulate-computation:no", "--cfg=smpi/test:0", "--log=root.thres:error",
                   "--cfg=smpi/shared-malloc-blocksize:67108864", "--cfg=contexts/stack-size:4096",
                   arguments.program.resolve(), str(positions), "1", "0"]
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as run:
            text = ""
            for line in run.stdout:
                if arguments.only == "forward" and line.startswith("backward"):
                    run.terminate()
                    return text
                text += line
    if run.returncode != 0:
        sys.exit(f"{text}\nplan.py: the simulated run failed")
    return text


def ranks_shown(ranks):
    return {0, ranks // 2, ranks - 1}


def run(arguments):
    rows = []
    for ranks in arguments.ranks:
        positions = arguments.positions or arguments.share * ranks
        text = simulate(arguments, ranks, positions)
        print(f"{positions} positions, {ranks} ranks of {arguments.gflops:g} GFLOP/s, {arguments.gbit:g} Gbit/s, "
              f"{arguments.us:g} µs:")
        for line in text.splitlines():
            rank = re.search(r"rank (\d+) of", line)
            # The simulation has no results, and the memory is the simulator's.
            if rank and int(rank[1]) not in ranks_shown(ranks) or line.endswith("…") or line.startswith("checksum"):
                continue
            print("  " + re.sub(r", \d+ MiB of memory.*", "", line))
        for name, seconds, rate in re.findall(r"^(forward|backward) +([\d.]+) s, ([\d.]+) GFLOP/s$", text, re.M):
            speed = arguments.gflops * min(ranks, -(-ranks // arguments.node_ranks) * arguments.cores)
            speed *= arguments.backward if name == "backward" else 1
            rows.append([positions, ranks, arguments.gbit, arguments.us, arguments.gflops, name, seconds,
                         f"{float(rate) / speed:.3f}"])
            print(f"  {name}: {float(rate) / speed:.1%} of the ranks' rate", flush=True)
    if arguments.out:
        is_new = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            csv.writer(file).writerows([FIELDS] * is_new + rows)


def most_ranks(rows, value):
    """Returns the rows with one value: the value that was run with the most numbers of ranks."""
    values = {value(row) for row in rows}
    best = max(sorted(values), key=lambda v: len({row["ranks"] for row in rows if value(row) == v}))
    return best, [row for row in rows if value(row) == best]


def plot(arguments):
    with arguments.runs.open() as file:
        rows = [{key: row[key] if key == "pass" else float(row[key]) for key in FIELDS} for row in csv.DictReader(file)]
    ranks = sorted({int(row["ranks"]) for row in rows})
    panels = []
    for name in ("forward", "backward"):
        of_pass = [row for row in rows if row["pass"] == name]
        if of_pass:
            positions, strong = most_ranks(of_pass, lambda row: row["positions"])
            share, weak = most_ranks(of_pass, lambda row: row["positions"] / row["ranks"])
            panels += [(f"{name}, {positions:,.0f} positions", strong), (f"{name}, {share:,.0f} positions a rank", weak)]
    lines = [
        f"set terminal pngcairo size 1300,{len(panels) // 2 * 460 + 80} font 'Sans,12'",
        f"set output '{arguments.output}'",
        f"set multiplot layout {len(panels) // 2},2 margins 0.06,0.98,0.22,0.92 spacing 0.07,0.11",
        "set logscale x 2",
        f"set xtics ({', '.join(map(str, ranks))})",
        f"set xrange [{0.8 * ranks[0]}:{1.25 * ranks[-1]}]",
        "set yrange [0:105]",
        "set xlabel 'ranks'",
        "set ylabel '% of the rate of all ranks'",
        "set grid linecolor rgb '#d8d8d8' linetype 1",
        "set border 3",
        "set tics nomirror",
        "unset key",  # until the last picture, which has the legend for all
    ]
    colours = {25: "#c03030", 100: "#e89020", 400: "#2060b0"}
    for number, (title, of_panel) in enumerate(panels):
        plots = []
        for gbit, colour in colours.items():
            chosen = sorted({(row["ranks"], 100 * row["efficiency"]) for row in of_panel if row["gbit"] == gbit})
            if not chosen:
                continue
            block = f"$panel{number}_{gbit}"
            lines += [f"{block} << END", *(f"{x} {y}" for x, y in chosen), "END"]
            plots.append(f"{block} with linespoints pointtype 7 pointsize 0.8 linewidth 2 linecolor rgb '{colour}' "
                         f"title '{gbit} Gbit/s'")
        lines.append(f"set title '{title}' font ',14'")
        if number == len(panels) - 1:
            lines.append("set key at screen 0.5,0.05 center horizontal Left reverse")
        lines.append("plot " + ", \\\n     ".join(plots))
    subprocess.run(["gnuplot"], input="\n".join(lines + ["unset multiplot", ""]), text=True, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_run = commands.add_parser("run", help="simulate, print what the ranks print, add to a table")
    of_run.add_argument("program", type=pathlib.Path, help="ring_simulated.so, as CMake builds it")
    of_run.add_argument("--ranks", type=int, nargs="+", required=True)
    length = of_run.add_mutually_exclusive_group(required=True)
    length.add_argument("--positions", type=int, help="of the sequence: strong scaling")
    length.add_argument("--share", type=int, help="positions of a rank: weak scaling")
    of_run.add_argument("--gbit", type=float, default=100, help="bandwidth of a machine, each way")
    of_run.add_argument("--us", type=float, default=5, help="latency from machine to machine")
    of_run.add_argument("--gflops", type=float, default=85, help="rate of a rank, forward, as ring with one rank prints")
    of_run.add_argument("--backward", type=float, default=1, help="the backward's rate over the forward's")
    of_run.add_argument("--node-ranks", type=int, default=1, help="ranks of a machine")
    of_run.add_argument("--cores", type=int, default=1, help="of a machine: so many ranks compute at once")
    of_run.add_argument("--only", choices=["forward"], help="stop before the backward")
    of_run.add_argument("--out", type=pathlib.Path, help="a CSV that is added to")
    of_run.set_defaults(command=run)
    of_plot = commands.add_parser("plot", help="draw such a table")
    of_plot.add_argument("runs", type=pathlib.Path)
    of_plot.add_argument("output", type=pathlib.Path)
    of_plot.set_defaults(command=plot)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
