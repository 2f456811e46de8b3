"""Compares TabICL 2 of its default size, with random weights, by its own code and by this library.

    python examples/pytorch/benchmark_tabicl.py --rows 1200 --columns 24 --threads 1

Prints medians over alternating runs: processor time with one thread, wall-clock time with several threads. Measures the
softmax of attention (scores, softmax, sums and SSMax's multipliers), all of attention except its two projections
(with positions and copies), and the whole forward.
"""

import argparse
import time
from collections import defaultdict
from contextlib import contextmanager
from copy import deepcopy
from statistics import median

import torch
from tabicl._model import attention as own
from tabicl._model import ssmax
from tabicl._model.inference_config import InferenceConfig
from tabicl._model.layers import MultiheadAttention
from tabicl._model.tabicl import TabICL
from torch.nn import functional as F

import ssmax_torch.tabicl as ours


def random_model(kind):
    torch.manual_seed(0)
    model = TabICL(row_rope_interleaved=False, col_ssmax=kind, icl_ssmax=kind).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@contextmanager
def timed(clock, spent):
    """Adds the time of each part. For softmax, `own` calls one function and `ours` calls two."""
    weights = set()  # of projections, by their address
    depth = 0

    def wrap(owner, name, part, counts=lambda *_: True):
        original = getattr(owner, name)

        def call(*arguments, **options):
            nonlocal depth
            if not counts(*arguments) or (part == "softmax" and depth):
                return original(*arguments, **options)
            depth += part == "softmax"
            start = clock()
            result = original(*arguments, **options)
            spent[part] += clock() - start
            depth -= part == "softmax"
            return result

        setattr(owner, name, call)
        return owner, name, original

    def is_projection(_, weight, *__):
        return weight.untyped_storage().data_ptr() in weights

    def is_attention(module, *_):
        weights.update(w.untyped_storage().data_ptr() for w in (module.in_proj_weight, module.out_proj.weight))
        return True

    replaced = [
        wrap(own, "sdpa_with_flattened_batch", "softmax"),
        wrap(ours, "attention", "softmax"),
        *(wrap(layer, "forward", "softmax") for layer in (ssmax.SSMaxMLP, ssmax.QASSMaxMLP)),
        wrap(MultiheadAttention, "forward", "module", is_attention),
        wrap(ours.Attention, "forward", "module", is_attention),
        wrap(F, "linear", "projections", is_projection),
    ]
    try:
        yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


def measure(model, x, y, clock):
    config = InferenceConfig()  # the setting of TabICL's own classifier on a CPU
    for part in (config.COL_CONFIG, config.ROW_CONFIG, config.ICL_CONFIG):
        part.update({"device": "cpu", "use_amp": False, "verbose": False})
    spent = defaultdict(float)
    with torch.no_grad(), timed(clock, spent):
        start = clock()
        out = model(x, y, inference_config=config)
        spent["forward"] = clock() - start
    return out, {
        "softmax": spent["softmax"],
        "attention without projections": spent["module"] - spent["projections"],
        "whole forward": spent["forward"],
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--rows", type=int, default=1200)
    options.add_argument("--columns", type=int, default=24)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--kind", default="qassmax-mlp-elementwise", help="of SSMax")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter

    x = torch.randn(1, arguments.rows, arguments.columns)
    y = torch.randint(0, 10, (1, arguments.rows * 4 // 5)).float()
    models = [random_model(arguments.kind)]
    models.append(ours.patch(deepcopy(models[0])))
    if arguments.runs > 1:  # the first run touches the memory and does not count
        [measure(model, x, y, clock) for model in models]
    runs = [[measure(model, x, y, clock) for model in models] for _ in range(arguments.runs)]
    print(f"largest difference of the logits: {max((a - b).abs().max().item() for (a, _), (b, _) in runs):.1e}")
    print("| part | its own, s | this library, s | times faster |\n|---|---|---|---|")
    for part in runs[0][0][1]:
        a, b = (median(run[i][1][part] for run in runs) for i in range(2))
        print(f"| {part} | {a:.3f} | {b:.3f} | {a / b:.2f} |")


if __name__ == "__main__":
    main()
