"""Compares this package to PyTorch's own attention on this machine: a table in Markdown, and a plot.

    python examples/pytorch/benchmark.py --threads 2 --plot examples/pytorch/benchmark.png

The calls of one row alternate, and each ratio is the median over the rounds, so that a busy machine slows all calls.
PyTorch's functions: sdpa (flash, if flash accepts the arguments), compiled FlexAttention (if it runs), eager.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
import torch.nn.functional as F

from ssmax_torch import attention, mask, scaling, score

HEADS, WIDTH = 8, 64


def qkv(n: int, requires_grad: bool):
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, n, WIDTH, requires_grad=requires_grad) for _ in range(3)]


def causal_matrix(n: int):
    return torch.ones(n, n, dtype=torch.bool).tril()


def eager(q, k, v, visible, bias=None, c=None):
    z = q @ k.transpose(2, 3) / WIDTH**0.5
    z = z if bias is None else z + bias
    z = z if c is None else z * c[..., None]
    return z.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def flex(mask_mod, score_mod=None, n=0):
    """Returns FlexAttention, compiled once for the length, or None if it does not run."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = create_block_mask(mask_mod, None, None, n, n, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)


def logarithms(n: int):
    return torch.arange(1, n + 1).log()


def case_causal(n: int, requires_grad: bool):
    q, k, v = qkv(n, requires_grad)
    visible = causal_matrix(n)
    causal = flex(lambda b, h, i, j: i >= j, n=n)
    return [q, k, v], {
        "ssmax_torch": lambda: attention(q, k, v, mask=mask.Causal()),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "flex": lambda: causal(q, k, v),
        "eager": lambda: eager(q, k, v, visible),
    }


def case_ssmax(n: int, requires_grad: bool):
    q, k, v = qkv(n, requires_grad)
    s = torch.full((HEADS,), 0.43, requires_grad=requires_grad)
    visible, log_n = causal_matrix(n), logarithms(n)
    causal = flex(lambda b, h, i, j: i >= j, n=n)

    def scaled():
        return q * (s[:, None] * log_n)[..., None]

    return [q, k, v, s], {
        "ssmax_torch": lambda: attention(q, k, v, scaling=scaling.SSMax(s), mask=mask.Causal()),
        "sdpa": lambda: F.scaled_dot_product_attention(scaled(), k, v, is_causal=True),
        "flex": lambda: causal(scaled(), k, v),
        "eager": lambda: eager(q, k, v, visible, c=s[:, None] * log_n),
    }


def case_bias(n: int, requires_grad: bool):
    q, k, v = qkv(n, requires_grad)
    bias = torch.randn(HEADS, n, n, requires_grad=requires_grad)
    visible = causal_matrix(n)
    biased = flex(lambda b, h, i, j: i >= j, lambda z, b, h, i, j: z + bias[h, i, j], n=n)
    hidden = torch.zeros(n, n).masked_fill(~visible, -torch.inf)
    return [q, k, v, bias], {
        "ssmax_torch": lambda: attention(q, k, v, mask=mask.Causal(), score=score.Bias(bias)),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=(bias + hidden)[None]),
        "flex": lambda: biased(q, k, v),
        "eager": lambda: eager(q, k, v, visible, bias=bias),
    }


def case_documents(n: int, requires_grad: bool):
    """A causal mask within each of eight documents of different lengths."""
    q, k, v = qkv(n, requires_grad)
    cumulative = [0, n // 4, n // 3, n // 2, n * 5 // 8, n * 3 // 4, n * 7 // 8, n * 15 // 16, n]
    document = torch.searchsorted(torch.tensor(cumulative), torch.arange(n), right=True)
    visible = causal_matrix(n) & (document == document[:, None])
    packed = flex(lambda b, h, i, j: (i >= j) & (document[i] == document[j]), n=n)
    return [q, k, v], {
        "ssmax_torch": lambda: attention(q, k, v, mask=mask.Documents(cumulative)),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=visible),
        "flex": lambda: packed(q, k, v),
        "eager": lambda: eager(q, k, v, visible),
    }


def case_window(n: int, requires_grad: bool):
    """A window: each query sees its own key and the 255 keys before."""
    q, k, v = qkv(n, requires_grad)
    visible = torch.ones(n, n, dtype=torch.bool).tril().triu(-255)
    near = flex(lambda b, h, i, j: (i >= j) & (i - j < 256), n=n)
    return [q, k, v], {
        "ssmax_torch": lambda: attention(q, k, v, mask=mask.SlidingWindow(255)),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=visible),
        "flex": lambda: near(q, k, v),
        "eager": lambda: eager(q, k, v, visible),
    }


CASES = {
    "causal": case_causal,
    "SSMax with ds": case_ssmax,
    "learnable bias per head": case_bias,
    "documents": case_documents,
    "window of 256": case_window,
}
WAYS = ["ssmax_torch", "sdpa", "flex", "eager"]


def step(call, parameters, backward: bool) -> None:
    if backward:
        torch.autograd.grad(call().sum(), parameters)
    else:
        with torch.no_grad():
            call()


def measure(case, n: int, backward: bool, rounds: int, clock, ways=WAYS):
    """Returns the median seconds of each way over alternating rounds. Leaves out ways that do not run."""
    parameters, calls = case(n, backward)
    expected, times = None, {}
    for way in ways:
        try:
            step(calls[way], parameters, backward)
            with torch.no_grad():
                out = calls[way]()
        except Exception as error:  # PyTorch has different exceptions for this
            print(f"<!-- {way} does not run: {str(error).splitlines()[0][:100]} -->")
            continue
        expected = out if expected is None else expected
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)  # all ways have the same result
        times[way] = []
    for _ in range(rounds):
        for way in times:
            start = clock()
            step(calls[way], parameters, backward)
            times[way].append(clock() - start)
    return {way: statistics.median(values) for way, values in times.items()}


def overhead(rounds: int, clock) -> None:
    """Prints the time of a call with a tiny input: the time before and after the library's own computation."""
    q = k = v = torch.randn(1, 1, 2, 8)
    s = scaling.SSMax(torch.ones(1))
    causal = mask.Causal()

    def time_of(call):
        times = []
        for _ in range(rounds * 10):
            start = clock()
            for _ in range(100):
                call()
            times.append((clock() - start) / 100)
        return statistics.median(times) * 1e6

    with torch.no_grad():
        ours = time_of(lambda: attention(q, k, v, scaling=s, mask=causal))
        theirs = time_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    q = q.clone().requires_grad_()
    recorded = time_of(lambda: attention(q, k, v, scaling=s, mask=causal))
    print(f"\nA call of 2 keys: {ours:.1f} µs, recorded for backward {recorded:.1f} µs; sdpa {theirs:.1f} µs.")


def draw(results: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axis, backward in zip(axes, (False, True), strict=True):
        names = [name for name, _, b in results if b == backward]
        rows = [results[key] for key in results if key[2] == backward]
        for i, way in enumerate(WAYS[1:]):
            at = [j + 0.27 * (i - 1) for j in range(len(rows))]
            ratios = [row[way] / row["ssmax_torch"] if way in row else 0 for row in rows]
            bars = axis.bar(at, ratios, 0.25, label=way)
            axis.bar_label(bars, [f"{ratio:.1f}" if ratio else "–" for ratio in ratios], fontsize=7)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(rows)), names, fontsize=8, rotation=15)
        axis.set_yscale("log")
        axis.set_title("forward + backward" if backward else "forward")
    axes[0].set_ylabel("time of PyTorch's / time of ssmax_torch")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--cpu-time", action="store_true", help="on a busy machine, with one thread: time of the processor")
    parser.add_argument("--plot")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    print(f"float32, {HEADS} heads of width {WIDTH}, n {options.n}, {options.threads} threads, ms; in brackets how many")
    print("times the time of ssmax_torch. A dash: PyTorch does not do it on CPUs.\n")
    print("| | " + " | ".join(WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|")
    clock = time.process_time if options.cpu_time else time.perf_counter
    results = {}
    for backward in (False, True):
        for name, case in CASES.items():
            row = results[name, options.n, backward] = measure(
                case, options.n, backward, options.rounds, clock, options.ways
            )
            ours = row["ssmax_torch"]
            cells = [
                "–" if way not in row else f"{row[way] * 1e3:.0f}" + (f" ({row[way] / ours:.1f})" if way != "ssmax_torch" else "")
                for way in WAYS
            ]
            print(f"| {name}, {'forward + backward' if backward else 'forward'} | " + " | ".join(cells) + " |", flush=True)
    overhead(options.rounds, clock)
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
