#!/usr/bin/python3
"""Writes golden_values.hpp beside this script: what PyTorch computes in float64, gradients by autograd.

Needs Debian's python3-torch. The formulas are written out here and share nothing with the library, so that a
misunderstanding in one of the two shows up. Inputs are multiples of small powers of two: a float test reads
the very same numbers as a double test.
"""

import math
import pathlib

import torch

torch.manual_seed(20250131)
HEADS, QUERIES, KEYS = 2, 5, 7
LENGTHS = [[7, 3, 0, 1, 5], [2, 7, 4, 0, 6]]


def grid(values, step):
    """Rounds to multiples of 1/step, which float and double hold exactly."""
    return torch.round(values.double() * step) / step


def number(value):
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.15g}"  # inputs are exact in it; outputs keep 5e-15, a twentieth of the test's tolerance


def array(name, values):
    """One constexpr array, on one line: nobody reads the numbers, and a change shows which arrays differ."""
    numbers = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    return f"inline constexpr double {name}[] = {{{', '.join(map(number, numbers))}}};\n"


def case(kind, name, members):
    """A case of the arrays `name_member`, on one line where 120 columns hold it."""
    text = ", ".join(f".{member} = {name}_{member}" for member in members)
    line = f"inline constexpr {kind} {name}{{{text}}};\n"
    return line if len(line) <= 121 else line.replace("{", "{\n    ", 1)


# --- rows -----------------------------------------------------------------------------------------------------


def position_of(query, queries, keys):
    """0-based position of a query among the keys: bottom-right aligned, the last query sits on the last key."""
    return keys - queries + query


class Scaling:
    """A multiplier as a function of the row; the learnable ones own leaves that collect ds, db, dp."""

    def __init__(self, multiplier, s=None, b=None, p=None):
        self.multiplier, self.s, self.b, self.p = multiplier, s, b, p


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def ssmax(s, b=None):
    s, b = leaf(s), None if b is None else leaf(b)

    def multiplier(head, position, n):
        return s[head] * math.log(n) + (0.0 if b is None else b[head])

    return Scaling(multiplier, s, b)


def size_table(p, s, b):
    p, s, b = leaf(p), leaf(s), leaf(b)
    return Scaling(lambda head, position, n: s[head] * p[n - 1] + b[head], s, b, p)


def plain(function):
    return Scaling(lambda head, position, n: torch.tensor(function(head, position, n), dtype=torch.float64))


S, B = [0.4375, 1.25], [0.25, 0.5]
S_SIGNS, B_SIGNS = [1.0, -0.375], [-0.75, 0.5]  # the multiplier changes its sign with n in both heads
P = [0.0, 0.75, 1.0625, 1.4375, 1.5, 1.875, 2.0]
QWEN_LENGTH, LLAMA4_FLOOR, MINISTRAL_LENGTH, YARN_EXTENSION = 4, 2, 2, 4

SCALINGS = {
    "softmax": lambda: plain(lambda head, position, n: 1.0),
    "ssmax": lambda: ssmax(S),
    "ssmax_bias": lambda: ssmax(S, B),
    "ssmax_signs": lambda: ssmax(S_SIGNS, B_SIGNS),
    "ssmax_negative": lambda: ssmax([-0.75, -2.0]),
    "ssmax_zero": lambda: ssmax([0.0, 0.0], [0.0, 0.0]),
    "logn": lambda: plain(lambda head, position, n: math.log(n)),
    "size_table": lambda: size_table(P, S, B),
    "qwen": lambda: plain(
        lambda head, position, n: max(1.0, math.log(position + 1) / math.log(QWEN_LENGTH))
    ),
    "llama4": lambda: plain(
        lambda head, position, n: 1.0 + 0.1 * math.log(1.0 + math.floor((position + 1) / LLAMA4_FLOOR))
    ),
    "ministral": lambda: plain(
        lambda head, position, n: 1.0 + 0.1 * math.log(1.0 + math.floor(position / MINISTRAL_LENGTH))
    ),
    "yarn": lambda: plain(lambda head, position, n: (0.1 * math.log(YARN_EXTENSION) + 1.0) ** 2),
}
# Where each scaling is written out; the causal cases carry the log form as well.
MASKS = {
    "softmax": ("full", "causal", "lengths"),
    "ssmax": ("full", "causal", "lengths"),
    "ssmax_bias": ("full", "causal", "lengths"),
    "ssmax_signs": ("causal", "lengths"),
    "ssmax_negative": ("full",),
    "ssmax_zero": ("causal",),
    "logn": ("full", "lengths"),
    "size_table": ("causal", "lengths"),
    "qwen": ("full", "causal"),
    "llama4": ("causal",),
    "ministral": ("causal",),
    "yarn": ("causal",),
}


def visible(mask, head, query, keys):
    if mask == "full":
        return keys
    if mask == "causal":
        return max(0, position_of(query, QUERIES, keys) + 1)
    return LENGTHS[head][query]


def rows(scaling, mask, logits_values, g, keys):
    """y, log y, and the gradients of <g, y> and <g, log y>; hidden keys hold 0, or -inf in the log form."""
    result = {}
    for form in ("softmax", "log_softmax"):
        own = scaling()
        logits = logits_values.clone().requires_grad_(True)
        y = torch.full_like(logits_values, 0.0 if form == "softmax" else -math.inf)
        loss = torch.zeros((), dtype=torch.float64)
        for head in range(HEADS):
            for query in range(QUERIES):
                n = visible(mask, head, query, keys)
                if n == 0:
                    continue
                c = own.multiplier(head, max(0, position_of(query, QUERIES, keys)), n)
                row = getattr(torch, form)(c * logits[head, query, :n], dim=-1)
                y[head, query, :n] = row.detach()
                loss = loss + (row * g[head, query, :n]).sum()
        loss.backward()
        result[form] = {"y": y, "dz": logits.grad}
        for name in ("s", "b", "p"):
            parameter = getattr(own, name)
            if parameter is not None:
                result[form]["d" + name] = parameter.grad
    return result


def rows_case(name, scaling, mask, logits, g, keys, log_form):
    computed = rows(scaling, mask, logits, g, keys)
    text, members = "", []
    forms = [("softmax", "")] + ([("log_softmax", "log_")] if log_form else [])
    for form, prefix in forms:
        for member in ("y", "dz", "ds", "db", "dp"):
            if member in computed[form]:
                text += array(f"{name}_{prefix}{member}", computed[form][member])
                members.append(prefix + member)
    return text + case("RowsCase", name, members)


# --- RoPE -----------------------------------------------------------------------------------------------------


def frequencies(width, theta):
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


def linear(width, theta, factor):
    return frequencies(width, theta) / factor


def ntk(width, theta, factor):
    """NTK-aware: the base grows so that the slowest pair is stretched by factor and the fastest not at all."""
    return frequencies(width, theta * factor ** (width / (width - 2)))


def yarn(width, theta, factor, original, beta_fast=32.0, beta_slow=1.0):
    """Interpolated and extrapolated frequencies, blended by a ramp over the pairs."""

    def pair_with_rotations(rotations):
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_rotations(beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(beta_slow)), width - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low), 0.0, 1.0)
    extrapolated = frequencies(width, theta)
    return extrapolated / factor * ramp + extrapolated * (1.0 - ramp)


def llama3(width, theta, factor, original, low=1.0, high=4.0):
    """Long wavelengths are stretched, short ones kept, those between blended by how often they fit."""
    result = []
    for frequency in frequencies(width, theta).tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            result.append(frequency)
        elif wavelength > original / low:
            result.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(result, dtype=torch.float64)


def rotate(x, positions, frequency, pairing):
    """x [..., position, channel]; the first 2 * len(frequency) channels turn, the others pass."""
    half = len(frequency)
    angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * frequency[None, :]
    cosine, sine = torch.cos(angle), torch.sin(angle)
    turned, passed = x[..., : 2 * half], x[..., 2 * half :]
    if pairing == "half_split":
        a, b = turned[..., :half], turned[..., half:]
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine, passed), dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    return torch.cat((pairs.flatten(-2), passed), dim=-1)


ROPE_POSITIONS = [0, 1, 2, 37, 1000]
ROPE_CHANNELS, ROPE_THETA = 10, 10000.0


def rope_cases():
    x = grid(torch.randn(len(ROPE_POSITIONS), ROPE_CHANNELS), 64)
    g = grid(torch.randn(len(ROPE_POSITIONS), ROPE_CHANNELS), 64)
    cases = {
        "half_split": (frequencies(10, ROPE_THETA), "half_split"),
        "interleaved": (frequencies(10, ROPE_THETA), "interleaved"),
        "partial_half_split": (frequencies(6, ROPE_THETA), "half_split"),
        "partial_interleaved": (frequencies(4, 500000.0), "interleaved"),
        "linear": (linear(10, ROPE_THETA, 4.0), "half_split"),
        "ntk": (ntk(10, ROPE_THETA, 4.0), "half_split"),
        "yarn": (yarn(10, ROPE_THETA, 4.0, 2048), "half_split"),
        "llama3": (llama3(10, ROPE_THETA, 8.0, 2048), "interleaved"),
    }
    text = array("rope_positions", ROPE_POSITIONS) + array("rope_in", x) + array("rope_dout", g)
    for name, (frequency, pairing) in cases.items():
        leaf_x = x.clone().requires_grad_(True)
        out = rotate(leaf_x, ROPE_POSITIONS, frequency, pairing)
        (out * g).sum().backward()
        text += array(f"rope_{name}_out", out.detach()) + array(f"rope_{name}_din", leaf_x.grad)
        text += case("RopeCase", f"rope_{name}", ("out", "din"))
    # Wide heads are where the blends of yarn and llama3 have pairs on their ramps: the frequencies themselves.
    wide = {
        "linear": linear(64, 10000.0, 8.0),
        "ntk": ntk(64, 10000.0, 8.0),
        "yarn": yarn(64, 10000.0, 8.0, 4096),
        "llama3": llama3(64, 500000.0, 8.0, 8192),
    }
    for name, frequency in wide.items():
        text += array(f"rope_wide_{name}_frequencies", frequency)
    return text


# --- attention ------------------------------------------------------------------------------------------------

BATCH, Q_HEADS, KV_HEADS, N, M, D, DV = 2, 4, 2, 9, 13, 8, 6
S_HEADS, B_HEADS = [0.5, 1.0, -0.25, 0.75], [0.25, -0.5, 0.125, 0.0]


def attend(q, k, v, causal, multiplier, scale, frequency=None, pairing=None):
    """Naive: every logit, every head; kv head = q head // (q heads per kv head)."""
    if frequency is not None:
        q = rotate(q, [position_of(i, N, M) for i in range(N)], frequency, pairing)
        k = rotate(k, list(range(M)), frequency, pairing)
    out = torch.zeros(BATCH, Q_HEADS, N, DV, dtype=torch.float64)
    lse = torch.zeros(BATCH, Q_HEADS, N, dtype=torch.float64)
    for batch in range(BATCH):
        for head in range(Q_HEADS):
            kv = head // (Q_HEADS // KV_HEADS)
            for i in range(N):
                n = position_of(i, N, M) + 1 if causal else M
                z = multiplier(head, n) * scale * (k[batch, kv, :n] @ q[batch, head, i])
                out[batch, head, i] = torch.softmax(z, dim=-1) @ v[batch, kv, :n]
                lse[batch, head, i] = torch.logsumexp(z, dim=-1)
    return out, lse


def attention_cases():
    q = grid(torch.randn(BATCH, Q_HEADS, N, D), 32)
    k = grid(torch.randn(BATCH, KV_HEADS, M, D), 32)
    v = grid(torch.randn(BATCH, KV_HEADS, M, DV), 32)
    text = array("attention_q", q) + array("attention_k", k) + array("attention_v", v)
    text += array("attention_s", S_HEADS) + array("attention_b", B_HEADS)

    def with_bias(head, n):
        return S_HEADS[head] * math.log(n) + B_HEADS[head]

    usual = 1.0 / math.sqrt(D)
    cases = {
        "full_ssmax": attend(q, k, v, False, with_bias, 0.5),
        "causal_rope": attend(q, k, v, True, with_bias, usual, frequencies(8, 10000.0), "half_split"),
        "causal_partial_rope": attend(
            q, k, v, True, lambda head, n: 1.0, usual, frequencies(4, 100.0), "interleaved"
        ),
    }
    for name, (out, lse) in cases.items():
        text += array(f"attention_{name}_out", out) + array(f"attention_{name}_lse", lse)
        text += case("AttentionCase", f"attention_{name}", ("out", "lse"))
    return text


# --- gradients of attention -----------------------------------------------------------------------------------

G_QUERIES, G_KEYS, G_D, G_DV = 5, 7, 4, 3
G_SLOPES = [0.25, 0.125, -0.5, 1.0]
G_SINKS = [0.5, -1.25, 0.0, 2.0]
G_LENGTHS = [7, 4]
G_SCALE, G_CAP = 0.75, 1.5


def seen_keys(mask, batch, head, query):
    """The keys that a query sees."""
    at = position_of(query, G_QUERIES, G_KEYS)
    rules = {
        "full": lambda key: True,
        "causal": lambda key: key <= at,
        "window": lambda key: at - 2 <= key <= at + 1,
        "padded": lambda key: key <= at and key < G_LENGTHS[batch],
        "picked": lambda key: (3 * query + head + 5 * key) % 4 != 1,
        "none_for_some": lambda key: query % 2 == 0 and key >= 2,
    }
    return [key for key in range(G_KEYS) if rules[mask](key)]


def softcap(z):
    return G_CAP * torch.tanh(z / G_CAP)


def gradients(inputs, mask, scaling, scores=(), bias=None, sinks=False, rope=None, scale=None):
    """Attention, and the gradients of <dout, out> + <dlse, lse>; a row without a term has an lse of -inf and no part."""
    q, k, v, dout, dlse = (values.clone() for values in inputs)
    for values in (q, k, v):
        values.requires_grad_(True)
    slopes, sink, own = leaf(G_SLOPES), leaf(G_SINKS), scaling()
    if bias is not None:
        bias = bias.clone().requires_grad_(True)
    factor = 1 / math.sqrt(G_D) if scale is None else scale
    turned_q, turned_k = q, k
    if rope is not None:
        frequency, pairing, first = rope
        positions = [first + position_of(i, G_QUERIES, G_KEYS) for i in range(G_QUERIES)]
        turned_q = rotate(q, positions, frequency, pairing)
        turned_k = rotate(k, [first + i for i in range(G_KEYS)], frequency, pairing)
    out = torch.zeros(BATCH, Q_HEADS, G_QUERIES, G_DV, dtype=torch.float64)
    lse = torch.full((BATCH, Q_HEADS, G_QUERIES), -math.inf, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in range(BATCH):
        for head in range(Q_HEADS):
            kv = head // (Q_HEADS // KV_HEADS)
            for i in range(G_QUERIES):
                keys = seen_keys(mask, batch, head, i)
                c = own.multiplier(head, keys[-1], len(keys)) if keys else None
                if bias is not None:  # a key with a bias of -inf gets no weight, but counts in n
                    added = bias.expand(BATCH, Q_HEADS, G_QUERIES, G_KEYS)[batch, head, i]
                    keys = [key for key in keys if not math.isinf(added[key].item())]
                if not keys and not sinks:
                    continue
                z = factor * (turned_k[batch, kv, keys] @ turned_q[batch, head, i])
                for score in scores:
                    if score == "softcap":
                        z = softcap(z)
                    elif score == "alibi":
                        at = position_of(i, G_QUERIES, G_KEYS)
                        distances = [float(key - at) for key in keys]
                        z = z + slopes[head] * torch.tensor(distances, dtype=torch.float64)
                    else:
                        z = z + added[keys]
                logits = c * z if keys else z
                if sinks:
                    logits = torch.cat((logits, sink[head : head + 1]))
                weights = torch.softmax(logits, dim=-1)[: len(keys)]
                row = weights @ v[batch, kv, keys]
                row_lse = torch.logsumexp(logits, dim=-1)
                out[batch, head, i], lse[batch, head, i] = row.detach(), row_lse.detach()
                loss = loss + (row * dout[batch, head, i]).sum() + row_lse * dlse[batch, head, i]
    loss.backward()
    result = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name in ("s", "b", "p"):
        if getattr(own, name) is not None:
            result["d" + name] = getattr(own, name).grad
    if "alibi" in scores:
        result["dslopes"] = slopes.grad
    if bias is not None:
        result["dbias"] = bias.grad
    if sinks:
        result["dsinks"] = sink.grad
    return result


def gradient_cases():
    inputs = [
        grid(torch.randn(BATCH, Q_HEADS, G_QUERIES, G_D), 32),
        grid(torch.randn(BATCH, KV_HEADS, G_KEYS, G_D), 32),
        grid(torch.randn(BATCH, KV_HEADS, G_KEYS, G_DV), 32),
        grid(torch.randn(BATCH, Q_HEADS, G_QUERIES, G_DV), 32),
        grid(torch.randn(BATCH, Q_HEADS, G_QUERIES), 32),
    ]
    by_head = grid(torch.randn(1, Q_HEADS, G_QUERIES, G_KEYS), 32)
    by_head[:, :, :, 3] = -math.inf
    by_head[:, 1, 2] = -math.inf  # a whole row
    by_key = grid(torch.randn(BATCH, 1, 1, G_KEYS), 32)
    text = ""
    for name, values in zip(("q", "k", "v", "dout", "dlse"), inputs):
        text += array(f"gradients_{name}", values)
    text += array("gradients_slopes", G_SLOPES) + array("gradients_sinks", G_SINKS)
    text += array("gradients_lengths", G_LENGTHS)
    text += array("gradients_bias_by_head", by_head) + array("gradients_bias_by_key", by_key)

    def with_bias():
        return ssmax(S_HEADS, B_HEADS)

    def table():
        return size_table(P, S_HEADS, B_HEADS)

    cases = {
        "full": gradients(inputs, "full", with_bias),
        "causal_rope": gradients(
            inputs, "causal", with_bias, rope=(frequencies(4, 10000.0), "half_split", 0)
        ),
        "window_table": gradients(inputs, "window", table, ("softcap",), scale=G_SCALE),
        "padded_alibi": gradients(inputs, "padded", with_bias, ("alibi",)),
        "picked_bias": gradients(inputs, "picked", with_bias, ("bias",), by_head),
        "some_sinks": gradients(inputs, "none_for_some", with_bias, sinks=True),
        "all": gradients(
            inputs, "causal", with_bias, ("softcap", "bias", "alibi"), by_key, True,
            (frequencies(2, 10000.0), "interleaved", 11), G_SCALE
        ),
        "all_reversed": gradients(inputs, "picked", table, ("alibi", "bias", "softcap"), by_head, True),
    }
    for name, results in cases.items():
        for member, values in results.items():
            text += array(f"gradients_{name}_{member}", values)
        text += case("GradientCase", f"gradients_{name}", results)
    return text


HEAD = """// Written by generate.py from PyTorch in float64; run it again instead of editing this file.
#pragma once

#include <limits>
#include <span>

// clang-format off
namespace golden {

using Values = std::span<const double>;

/// Gradients are those of <dout, y> and, with log_ in front, of <dout, log y>. Empty: not part of the case.
struct RowsCase {
  Values y, dz, ds{}, db{}, dp{};
  Values log_y{}, log_dz{}, log_ds{}, log_db{}, log_dp{};
};
struct RopeCase {
  Values out, din;
};
struct AttentionCase {
  Values out, lse;
};
/// Gradients are those of <dout, out> + <dlse, lse>.
struct GradientCase {
  Values out, lse, dq, dk, dv;
  Values ds{}, db{}, dp{}, dslopes{}, dbias{}, dsinks{};
};

inline constexpr double inf = std::numeric_limits<double>::infinity();
"""


def main():
    text = HEAD
    for name in ("HEADS", "QUERIES", "KEYS", "QWEN_LENGTH", "LLAMA4_FLOOR", "MINISTRAL_LENGTH"):
        text += f"inline constexpr int {name.lower()} = {globals()[name]};\n"
    text += f"inline constexpr double yarn_extension = {YARN_EXTENSION};\n"
    for name in ("s", "b", "s_signs", "b_signs", "p"):
        text += array(name, globals()[name.upper()])
    text += array("lengths", LENGTHS)
    logits = grid(2.0 * torch.randn(HEADS, QUERIES, KEYS), 64)
    dout = grid(torch.randn(HEADS, QUERIES, KEYS), 64)
    text += array("logits", logits) + array("dout", dout)
    for name, scaling in SCALINGS.items():
        for mask in MASKS[name]:
            text += rows_case(f"{name}_{mask}", scaling, mask, logits, dout, KEYS, mask == "causal")
    text += rows_case(
        "ssmax_bias_one_key", SCALINGS["ssmax_bias"], "full", logits[:, :, :1].contiguous(),
        dout[:, :, :1].contiguous(), 1, True
    )
    for name in ("batch", "q_heads", "kv_heads"):
        text += f"inline constexpr int attention_{name} = {globals()[name.upper()]};\n"
    for name, value in (("n", N), ("m", M), ("d", D), ("dv", DV)):
        text += f"inline constexpr int attention_{name} = {value};\n"
    text += f"inline constexpr int rope_channels = {ROPE_CHANNELS};\n"
    text += rope_cases() + attention_cases()
    for name, value in (("queries", G_QUERIES), ("keys", G_KEYS), ("d", G_D), ("dv", G_DV)):
        text += f"inline constexpr int gradients_{name} = {value};\n"
    text += f"inline constexpr double gradients_scale = {G_SCALE}, gradients_cap = {G_CAP};\n"
    text += gradient_cases()
    text += "\n}  // namespace golden\n// clang-format on\n"
    pathlib.Path(__file__).with_name("golden_values.hpp").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
