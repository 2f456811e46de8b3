"""Compares every scaling, mask and score, and their gradients, to plain PyTorch in float64."""

import dataclasses
import math

import pytest
import reference
import torch

from ssmax_torch import KVCache, Rope, RopeScaling, attention, count_within_gaps, mask, scaling, score, yarn_mscale

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH, VALUE_WIDTH = 2, 4, 2, 21, 37, 8, 12


def random(*shape, low=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (low + torch.rand(shape, dtype=torch.float64, generator=generator)).requires_grad_()


def inputs():
    return (
        random(BATCH, HEADS, QUERIES, WIDTH, low=-0.5, seed=1),
        random(BATCH, KV_HEADS, KEYS, WIDTH, low=-0.5, seed=2),
        random(BATCH, KV_HEADS, KEYS, VALUE_WIDTH, low=-0.5, seed=3),
    )


def shape_of_seen():
    return BATCH, HEADS, QUERIES, KEYS


def check(ours, theirs, parameters, tolerance=1e-10):
    """Compares out, lse, and all gradients through out and lse."""
    generator = torch.Generator().manual_seed(9)
    weights = [torch.rand(x.shape, dtype=x.dtype, generator=generator) for x in theirs]
    finite = torch.isfinite(theirs[1])
    assert torch.equal(torch.isfinite(ours[1]), finite)
    totals = []
    for out, lse in (ours, theirs):
        totals.append((out * weights[0]).sum() + (torch.where(finite, lse, 0) * weights[1]).sum())
    torch.testing.assert_close(ours[0], theirs[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours[1][finite], theirs[1][finite], atol=tolerance, rtol=tolerance)
    gradients = [torch.autograd.grad(total, parameters) for total in totals]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=10 * tolerance, rtol=10 * tolerance)


def ones(n, p):
    return torch.ones_like(n)


S, B, P, C = random(HEADS, low=0.2), random(HEADS, low=-0.2), random(KEYS), random(BATCH, HEADS, QUERIES, low=0.5)
ONE_S, C_OF_QUERIES = random(), random(1, QUERIES)

SCALINGS = {
    "softmax": (scaling.Softmax(), ones, []),
    "log_n": (scaling.LogN(), lambda n, p: n.log(), []),
    "ssmax": (scaling.SSMax(S), lambda n, p: S[:, None] * n.log(), [S]),
    "ssmax_bias": (scaling.SSMax(S, B), lambda n, p: S[:, None] * n.log() + B[:, None], [S, B]),
    "ssmax_numbers": (scaling.SSMax(0.4, 0.1), lambda n, p: 0.4 * n.log() + 0.1, []),
    "ssmax_one_s": (scaling.SSMax(ONE_S), lambda n, p: ONE_S * n.log(), [ONE_S]),
    "size_table": (scaling.SizeTable(P, S, B), lambda n, p: S[:, None] * P[n.long() - 1] + B[:, None], [P, S, B]),
    "qwen": (scaling.QwenLogN(20), lambda n, p: (torch.log(p + 1) / math.log(20)).clamp(min=1), []),
    "llama4": (scaling.Llama4Temperature(0.1, 8), lambda n, p: 1 + 0.1 * torch.log1p((p + 1) // 8), []),
    "ministral": (scaling.MinistralTemperature(0.1, 8), lambda n, p: 1 + 0.1 * torch.log1p(p // 8), []),
    "constant": (scaling.Constant(0.7), lambda n, p: 0.7 * ones(n, p), []),
    "inkling": (scaling.InklingTemperature(0.1, 8), lambda n, p: 1 + 0.1 * torch.log(((p + 1) / 8).clamp(min=1)), []),
    "offset": (scaling.AdjustedSize(scaling.SSMax(S), 1), lambda n, p: S[:, None] * (n + 1).log(), [S]),
    "floor": (scaling.AdjustedSize(scaling.SSMax(S, B), 0, 9), lambda n, p: S[:, None] * n.clamp(min=9).log() + B[:, None], [S, B]),
    "per_query": (scaling.PerQuery(C), lambda n, p: C, [C]),
    "per_query_broadcast": (scaling.PerQuery(C_OF_QUERIES), lambda n, p: C_OF_QUERIES.expand(BATCH, HEADS, -1), [C_OF_QUERIES]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaling(name, causal):
    given, c, parameters = SCALINGS[name]
    q, k, v = inputs()
    seen = reference.visible(*shape_of_seen(), causal=causal)
    ours = attention(q, k, v, scaling=given, mask=mask.Causal() if causal else None, return_lse=True)
    check(ours, reference.attention(q, k, v, seen, c), [q, k, v, *parameters])


MATRIX = torch.rand(1, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(4)) < 0.7
ADDITIVE = torch.where(MATRIX[:, :1], torch.linspace(-1, 1, KEYS, dtype=torch.float64), -torch.inf)

MASKS = {
    "causal": (mask.Causal(), dict(causal=True)),
    "window": (mask.SlidingWindow(5, 2), dict(window=(5, 2))),
    "chunks": (mask.Chunks(7), dict(chunk=7)),
    "chunks & window": (mask.Chunks(7) & mask.SlidingWindow(3), dict(chunk=7, window=(3, 0))),
    "chunks & matrix": (mask.Chunks(7) & MATRIX, dict(chunk=7, matrix=MATRIX)),
    "top left": (mask.CausalTopLeft(), dict(top_left=True)),
    "top left & window": (mask.CausalTopLeft() & mask.SlidingWindow(5), dict(top_left=True, window=(5, 0))),
    "top left & matrix": (mask.CausalTopLeft() & MATRIX, dict(top_left=True, matrix=MATRIX)),
    "left padding": (mask.LeftPadding([0, 20]), dict(padding=[0, 20])),
    "all padding": (mask.LeftPadding([37, 16]), dict(padding=[37, 16])),
    "left padding & matrix": (mask.LeftPadding([3, 0]) & MATRIX, dict(padding=[3, 0], matrix=MATRIX)),
    "prefix": (mask.PrefixLM([3, 30]), dict(prefix=[3, 30])),
    "lengths": (mask.KeyLengths([5, 37]), dict(lengths=[5, 37])),
    "nothing": (mask.KeyLengths([0, 1]), dict(lengths=[0, 1])),
    "causal & lengths": (mask.Causal() & mask.KeyLengths(torch.tensor([20, 3])), dict(causal=True, lengths=[20, 3])),
    "windows": (mask.SlidingWindow(9, 0) & mask.SlidingWindow(5, 3), dict(window=(5, 0))),
    "matrix": (MATRIX, dict(matrix=MATRIX)),
    "causal & matrix": (mask.Causal() & MATRIX, dict(causal=True, matrix=MATRIX)),
    "additive": (ADDITIVE, dict(matrix=MATRIX[:, :1])),
    "matrices by modulo": (mask.MatrixMask(MATRIX[:, :2], modulo=True), dict(matrix=MATRIX[:, :2].repeat(1, 2, 1, 1))),
    "causal & matrices by modulo": (
        mask.Causal() & mask.MatrixMask(MATRIX[0, :2], modulo=True),
        dict(causal=True, matrix=MATRIX[:, :2].repeat(1, 2, 1, 1)),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    given, what = MASKS[name]
    q, k, v = inputs()
    seen = reference.visible(*shape_of_seen(), **what)
    bias = torch.where(seen, ADDITIVE, 0) if name == "additive" else None
    ours = attention(q, k, v, scaling=scaling.SSMax(S, B), mask=given, return_lse=True)
    c = SCALINGS["ssmax_bias"][1]
    check(ours, reference.attention(q, k, v, seen, c, bias=bias), [q, k, v, S, B])


def test_positions_of_left_padding():
    """Positions begin after the padding, for the rope and scalings. A sequence without its padding has the same result."""
    padding = [9, 30]
    q, k, v = random(BATCH, HEADS, KEYS, WIDTH), random(BATCH, KV_HEADS, KEYS, WIDTH), random(BATCH, KV_HEADS, KEYS, 3)
    given = dict(scaling=scaling.QwenLogN(8), rope=Rope(6, 100.0), return_lse=True)
    ours = attention(q, k, v, mask=mask.LeftPadding(padding), **given)
    for b, first in enumerate(padding):
        alone = attention(*(x[b : b + 1, :, first:] for x in (q, k, v)), mask=mask.Causal(), **given)
        for x, y in zip(ours, alone):
            torch.testing.assert_close(x[b : b + 1, :, first:], y)
            assert (x[b, :, :first] == (0 if x.dim() == 4 else -torch.inf)).all()


@pytest.mark.parametrize("queries, keys", [(21, 37), (37, 21), (5, 1), (1, 5)])
def test_positions_of_causal_top_left(queries, keys):
    """Query i has the position i, for the rope, Alibi and scalings."""
    q, k, v = random(BATCH, HEADS, queries, WIDTH), random(BATCH, KV_HEADS, keys, WIDTH), random(BATCH, KV_HEADS, keys, 3)
    slopes = random(HEADS)
    ours = attention(
        q, k, v, scaling=scaling.QwenLogN(8), mask=mask.CausalTopLeft(), score=score.Alibi(slopes), rope=Rope(6, 100.0),
        return_lse=True,
    )  # fmt: skip
    omega = frequencies(6, 100.0)
    turned_q, turned_k = (turned(x, torch.arange(x.shape[2])[:, None], omega) for x in (q, k))
    seen = reference.visible(BATCH, HEADS, queries, keys, top_left=True)
    c = lambda n, p: (torch.log(p + 1) / math.log(8)).clamp(min=1)  # noqa: E731
    theirs = reference.attention(turned_q, turned_k, v, seen, c, slopes=slopes, top_left=True)
    check(ours, theirs, [q, k, v, slopes])


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    """Packed documents have the results of separate documents."""
    q, k, v = inputs()
    queries, keys = [0, 4, 4, 15, 21], [0, 9, 12, 30, 37]
    given = mask.Documents(queries, cu_seqlens_keys=torch.tensor(keys, dtype=torch.int32), causal=causal)
    slopes = random(HEADS)
    ours = attention(q, k, v, scaling=scaling.SSMax(S), mask=given, score=score.Alibi(slopes), return_lse=True)
    parts = []
    for i in range(len(queries) - 1):
        at_q, at_k = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        length = queries[i + 1] - queries[i]
        seen = reference.visible(BATCH, HEADS, length, keys[i + 1] - keys[i], causal=causal)
        parts.append(
            reference.attention(q[:, :, at_q], k[:, :, at_k], v[:, :, at_k], seen, SCALINGS["ssmax"][1], slopes=slopes)
        )
    theirs = [torch.cat(part, 2) for part in zip(*parts, strict=True)]
    check(ours, theirs, [q, k, v, S, slopes])


SLOPES, BIAS, BIAS_OF_HEADS = random(HEADS), random(BATCH, HEADS, QUERIES, KEYS), random(HEADS, QUERIES, KEYS)
BIAS_OF_KEYS = random(BATCH, 1, 1, KEYS)

SCORES = {
    "softcap": (score.Softcap(0.7), dict(softcap=0.7)),
    "alibi": (score.Alibi(SLOPES), dict(slopes=SLOPES)),
    "absolute alibi": (score.Alibi(SLOPES, absolute=True), dict(slopes=SLOPES, absolute=True)),
    "softcap | absolute alibi | bias": (
        score.Softcap(0.7) | score.Alibi(SLOPES, absolute=True) | score.Bias(BIAS),
        dict(softcap=0.7, slopes=SLOPES, absolute=True, bias=BIAS),
    ),
    "bias": (score.Bias(BIAS), dict(bias=BIAS)),
    "bias of heads": (score.Bias(BIAS_OF_HEADS), dict(bias=BIAS_OF_HEADS)),
    "bias of keys": (score.Bias(BIAS_OF_KEYS), dict(bias=BIAS_OF_KEYS)),
    "scale invariant": (score.ScaleInvariant(4.0), dict(tau=4.0)),
    "softcap | alibi": (score.Softcap(0.7) | score.Alibi(SLOPES), dict(softcap=0.7, slopes=SLOPES)),
    "softcap | bias": (score.Softcap(0.7) | score.Bias(BIAS), dict(softcap=0.7, bias=BIAS)),
    "all": (score.Softcap(0.7) | score.Alibi(SLOPES) | score.Bias(BIAS), dict(softcap=0.7, slopes=SLOPES, bias=BIAS)),
    "two biases": (score.Bias(BIAS) | score.Bias(BIAS_OF_HEADS), dict(bias=BIAS + BIAS_OF_HEADS)),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_score(name, learns):
    given, what = SCORES[name]
    parameters = [x for x in (SLOPES, BIAS, BIAS_OF_HEADS, BIAS_OF_KEYS) if x is what.get("slopes") or x is what.get("bias")]
    if name == "two biases":
        parameters = [BIAS, BIAS_OF_HEADS]
    if not learns:
        for x in parameters:
            x.requires_grad_(False)
    try:
        q, k, v = inputs()
        seen = reference.visible(*shape_of_seen(), window=(20, 0))
        ours = attention(
            q, k, v, scaling=scaling.SSMax(S), mask=mask.SlidingWindow(20), score=given, return_lse=True
        )
        theirs = reference.attention(q, k, v, seen, SCALINGS["ssmax"][1], **what)
        check(ours, theirs, [q, k, v, S, *(parameters if learns else [])])
    finally:
        for x in parameters:
            x.requires_grad_()


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("matrix", [BIAS.detach(), BIAS_OF_KEYS.detach(), BIAS_OF_HEADS.detach()[0]])
def test_sloped_bias(matrix, softcap):
    q, k, v = inputs()
    given = score.SlopedBias(matrix, SLOPES.detach())
    given = given if softcap is None else score.Softcap(softcap) | given
    ours = attention(q, k, v, scaling=scaling.SSMax(S), mask=mask.SlidingWindow(20, 2), score=given, return_lse=True)
    seen = reference.visible(*shape_of_seen(), window=(20, 2))
    bias = SLOPES.detach()[:, None, None] * matrix
    check(ours, reference.attention(q, k, v, seen, SCALINGS["ssmax"][1], bias=bias, softcap=softcap), [q, k, v, S])


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("learns", [False, True])
def test_matrices_by_modulo(batch, learns):
    """Head h reads matrix h % 2 of a bias, of an additive mask and of a bias with slopes, through which gradients go."""
    q, k, v = inputs()
    two = random(batch, 2, QUERIES, KEYS).requires_grad_(learns)
    repeated = two.repeat(1, HEADS // 2, 1, 1)
    seen = reference.visible(*shape_of_seen(), window=(20, 0))
    window, parameters = mask.SlidingWindow(20), [q, k, v, *([two] if learns else [])]
    for slopes in (None, SLOPES, SLOPES.detach()):
        given = score.Softcap(0.7) | score.Bias(two, modulo=True)
        given = given if slopes is None else given | score.Alibi(slopes)
        ours = attention(q, k, v, mask=window, score=given, return_lse=True)
        theirs = reference.attention(q, k, v, seen, ones, bias=repeated, softcap=0.7, slopes=slopes)
        check(ours, theirs, [*parameters, *([SLOPES] if slopes is SLOPES else [])])
    matrix = two.detach()
    hidden = torch.where(matrix < 0.3, -torch.inf, matrix)
    ours = attention(q, k, v, scaling=scaling.SSMax(S), mask=mask.MatrixMask(hidden, modulo=True), return_lse=True)
    seen = reference.visible(*shape_of_seen(), matrix=(matrix >= 0.3).repeat(1, 2, 1, 1))
    theirs = reference.attention(q, k, v, seen, SCALINGS["ssmax"][1], bias=repeated.detach())
    check(ours, theirs, [q, k, v, S])
    ours = attention(q, k, v, score=score.SlopedBias(matrix, SLOPES.detach(), modulo=True), return_lse=True)
    bias = SLOPES.detach()[:, None, None] * repeated.detach()
    check(ours, reference.attention(q, k, v, reference.visible(*shape_of_seen()), ones, bias=bias), [q, k, v])


def test_wrong_matrices_by_modulo():
    q, k, v = (x.detach() for x in inputs())
    three = torch.ones(1, 3, QUERIES, KEYS, dtype=torch.bool)
    wrong = {
        "mask": dict(mask=mask.MatrixMask(three, modulo=True)),
        "bias": dict(score=score.Bias(three.double(), modulo=True)),
    }
    wrong["additive mask"] = dict(mask=mask.MatrixMask(three.double(), modulo=True))
    names = {"mask": "mask.MatrixMask", "bias": "score.Bias", "additive mask": "mask.MatrixMask"}
    for name, what in wrong.items():
        with pytest.raises(ValueError, match=f"{names[name]}: .* must divide the heads of the attention, 4"):
            attention(q, k, v, **what)
        with pytest.raises(ValueError, match="must have a number of matrices that divides 4 heads"):
            attention(q.to("meta"), k.to("meta"), v.to("meta"), **{n: to_meta(x) for n, x in what.items()})
    two = MATRIX[:, :2]
    with pytest.raises(ValueError, match=r"mask has shape \[1, 2, 21, 37\]"):
        attention(q, k, v, mask=two)
    by_modulo = mask.MatrixMask(two, modulo=True)
    for other in (MATRIX, ADDITIVE, by_modulo):
        with pytest.raises(ValueError, match="a MatrixMask with modulo does not work with another MatrixMask"):
            by_modulo & other
    with pytest.raises(ValueError, match="a Bias with modulo does not work with a Bias without modulo"):
        score.Bias(two.double(), modulo=True) | score.Bias(BIAS)
    both = score.Bias(two.double(), modulo=True) | score.Bias(two[:, :1].double(), modulo=True)
    assert both.modulo and both.bias.shape[-3] == 2
    with pytest.raises(ValueError, match=r"two Bias with modulo have \[2, 3\] matrices"):
        score.Bias(two.double(), modulo=True) | score.Bias(three.double(), modulo=True)
    additive = mask.MatrixMask(two.double(), modulo=True)
    with pytest.raises(ValueError, match="Bias does not work with an additive mask where one of them has modulo"):
        attention(q, k, v, mask=additive, score=score.Bias(BIAS))


def to_meta(policy):
    """Moves the tensors of a mask or score to the meta device."""
    for name, x in vars(policy).items():
        if isinstance(x, torch.Tensor):
            setattr(policy, name, x.to("meta"))
    return policy


@pytest.mark.parametrize("absolute", [False, True])
def test_absolute_distance_of_later_keys(absolute):
    """Later keys have a positive distance or, with absolute, a negative one."""
    q, k, v = inputs()
    ours = attention(q, k, v, score=score.Alibi(SLOPES, absolute), return_lse=True)
    seen = reference.visible(*shape_of_seen())
    check(ours, reference.attention(q, k, v, seen, ones, slopes=SLOPES, absolute=absolute), [q, k, v, SLOPES])


def test_one_of_slopes_and_bias_learns():
    q, k, v = inputs()
    seen = reference.visible(*shape_of_seen())
    for slopes, bias in ((SLOPES, BIAS.detach()), (SLOPES.detach(), BIAS)):
        given = score.Alibi(slopes) | score.Bias(bias)
        ours = attention(q, k, v, score=given, return_lse=True)
        theirs = reference.attention(q, k, v, seen, ones, slopes=slopes, bias=bias)
        check(ours, theirs, [q, k, v, slopes if slopes.requires_grad else bias])


@pytest.mark.parametrize("scaled", [False, True])
def test_sinks(scaled):
    q, k, v = inputs()
    sinks = random(HEADS)
    lengths = [9 if scaled else 0, 20]  # a query without a visible key has no c
    seen = reference.visible(*shape_of_seen(), lengths=lengths)
    ours = attention(
        q, k, v, scaling=scaling.SSMax(S), sinks=sinks, scaled_sinks=scaled, mask=mask.KeyLengths(lengths), return_lse=True
    )  # fmt: skip
    theirs = reference.attention(q, k, v, seen, SCALINGS["ssmax"][1], sinks=sinks, scaled_sinks=scaled)
    check(ours, theirs, [q, k, v, S, sinks])


def frequencies(width, theta):
    return theta ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)


def yarn(width, theta, factor, original, low, high, truncate):
    """Returns the frequencies by the formula of arXiv:2309.00071."""
    omega, pair = frequencies(width, theta), torch.arange(width // 2, dtype=torch.float64)
    first, last = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (high, low)
    )  # fmt: skip
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = ((pair - first) / (last - first)).clamp(0, 1)
    return omega / factor * ramp + omega * (1 - ramp)


def turned(x, positions, omega, interleaved=False, first=0, factor=1.0):
    """Returns the rows with rotated channels from `first` on. A pair with frequency 0 is not multiplied by the factor.
    positions are [..., tokens, 1 or pairs]."""
    angle = positions * omega
    factor = torch.where(omega == 0, 1.0, factor)
    cos, sin = factor * angle.cos(), factor * angle.sin()
    before, rotated, after = x.split([first, 2 * len(omega), x.shape[-1] - first - 2 * len(omega)], -1)
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([before, rotated, after], -1)


OWN = torch.tensor([0.7, 0.0, -0.3], dtype=torch.float64)

ROPES = {  # the rope, its frequencies, and the other arguments of `turned`
    "half split": (Rope(6, 100.0), frequencies(6, 100.0), {}),
    "interleaved": (Rope(6, 100.0, "interleaved"), frequencies(6, 100.0), dict(interleaved=True)),
    "first channel": (Rope(4, 100.0, first_channel=3), frequencies(4, 100.0), dict(first=3)),
    "attention factor": (Rope(6, 100.0, attention_factor=1.25), frequencies(6, 100.0), dict(factor=1.25)),
    "own frequencies": (Rope(6, frequencies=OWN, attention_factor=0.5), OWN, dict(factor=0.5)),
    "list of frequencies, interleaved": (
        Rope(6, pairing="interleaved", first_channel=2, frequencies=OWN.tolist()), OWN, dict(interleaved=True, first=2),
    ),
    "yarn": (Rope(6, 100.0, scaling=RopeScaling("yarn", 4.0, 1000.0)), yarn(6, 100.0, 4.0, 1000.0, 1, 32, True), {}),
    "yarn, not truncated": (
        Rope(6, 100.0, scaling=RopeScaling("yarn", 4.0, 1000.0, truncate=False)), yarn(6, 100.0, 4.0, 1000.0, 1, 32, False), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope(name):
    given, omega, what = ROPES[name]
    q, k, v = inputs()
    positions = 3 + torch.arange(KEYS, dtype=torch.float64)[:, None]
    seen = reference.visible(*shape_of_seen(), causal=True)
    rope = dataclasses.replace(given, key_position=3)
    ours = attention(q, k, v, mask=mask.Causal(), rope=rope, return_lse=True)
    turned_q, turned_k = turned(q, positions[KEYS - QUERIES :], omega, **what), turned(k, positions, omega, **what)
    check(ours, reference.attention(turned_q, turned_k, v, seen, ones), [q, k, v])


def test_rope_of_a_cache():
    """A cache rotates keys and queries by the same rope as attention."""
    q, k, v = (x.detach() for x in inputs())
    for rope, _, _ in ROPES.values():
        cache = KVCache(BATCH, KV_HEADS, WIDTH, capacity=KEYS, value_width=VALUE_WIDTH, dtype=torch.float64, rope=rope)
        cache.append(k, v)
        torch.testing.assert_close(cache.decode(q), attention(q, k, v, mask=mask.Causal(), rope=rope))


PADDED = torch.stack([torch.arange(KEYS) - 9, torch.arange(KEYS) - 4])  # negative positions of a padded batch
PLACES = torch.randint(0, 5000, (3, BATCH, KEYS), generator=torch.Generator().manual_seed(4))
SECTIONS = [0, 1, 2]

POSITIONS = {  # the positions and the axes
    "each entry": (PADDED, ()),
    "a list for all entries": (PADDED[:1].tolist(), ()),
    "sections": (PLACES, SECTIONS),
    "interleaved axes": (PLACES[:2].int(), [1, 0, 1]),
    "axes of all entries": (PLACES[:, 1:].movedim(1, 2).contiguous().movedim(2, 1), SECTIONS),
}


def turned_at(x, positions, axes, omega, **what):
    """Returns the rows [batch, heads, tokens, width], rotated to positions as those of Rope."""
    positions = torch.as_tensor(positions).double()
    each = positions[list(axes)].movedim(0, -1) if axes else positions[..., None]
    return turned(x, each[:, None], omega, **what)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("shown", [mask.Causal(), mask.MatrixMask(MATRIX)])
def test_rope_with_positions(name, shown):
    """out, lse and gradients equal those of rows that are rotated before the call."""
    positions, axes = POSITIONS[name]
    q, k, v = inputs()
    rope = Rope(6, 100.0, "interleaved", first_channel=1, attention_factor=1.5, positions=positions, axes=axes)
    what = dict(omega=frequencies(6, 100.0), interleaved=True, first=1, factor=1.5)
    queries = torch.as_tensor(positions)[..., KEYS - QUERIES :]
    turned_q, turned_k = turned_at(q, queries, axes, **what), turned_at(k, positions, axes, **what)
    ours = attention(q, k, v, mask=shown, rope=rope, return_lse=True)
    check(ours, attention(turned_q, turned_k, v, mask=shown, return_lse=True), [q, k, v])
    largest = count_within_gaps(q, k, [0.0], mask=shown, rope=rope).largest
    torch.testing.assert_close(largest, count_within_gaps(turned_q, turned_k, [0.0], mask=shown).largest)
    # A cache, whose sequences have appended other numbers of tokens.
    q, k, v = (x.detach() for x in (q, k, v))
    cache = KVCache(BATCH, KV_HEADS, WIDTH, capacity=KEYS, value_width=VALUE_WIDTH, dtype=torch.float64, rope=rope)
    cache.append(k[:, :, :5], v[:, :, :5])
    cache.append(k[:, :, 5:], v[:, :, 5:], counts=[KEYS - 5, KEYS - 9])
    for b, length in enumerate((KEYS, KEYS - 4)):
        places = torch.as_tensor(positions)
        one = places[..., b % places.shape[-2], None, :length]
        expected = attention(
            turned_at(q[b, None], one[..., length - QUERIES :], axes, **what),
            turned_at(k[b, None, :, :length], one, axes, **what), v[b, None, :, :length], mask=mask.Causal(),
        )  # fmt: skip
        torch.testing.assert_close(cache.decode(q)[b, None], expected)


def test_positions_of_a_left_padded_batch():
    """A padded prompt has the results of the prompt without padding. key_position counts tokens."""
    q, k, v = (x.detach() for x in inputs())
    rope = Rope(6, 100.0, positions=PADDED.clamp(min=0))
    visible = (PADDED >= 0)[:, None, None]
    out = attention(q, k, v, mask=mask.Causal() & visible, rope=rope)
    for b, begin in enumerate((9, 4)):
        short = q[b, None], k[b, None, :, begin:], v[b, None, :, begin:]
        torch.testing.assert_close(out[b, None], attention(*short, mask=mask.Causal(), rope=Rope(6, 100.0)))
    later = Rope(6, 100.0, key_position=2, positions=PLACES[0])
    shifted = Rope(6, 100.0, positions=PLACES[0, :, 2:])
    given = q[:, :, 2:], k[:, :, 2:], v[:, :, 2:]
    assert torch.equal(attention(*given, rope=later), attention(*given, rope=shifted))


def test_tables_of_other_positions():
    """A rope never has the tables of another rope: only positions, axes or the width differ."""
    q, k, v = (x.detach() for x in inputs())
    other = PLACES.clone()
    other[2, 1, 5] += 1
    ropes = [(PLACES, SECTIONS), (other, SECTIONS), (PLACES, [0, 2, 1]), (PLACES[:2], [0, 1, 1]), (PLACES[:2, :1], [0, 1, 1])]
    outs = [attention(q, k, v, rope=Rope(6, positions=positions, axes=axes)) for positions, axes in 2 * ropes]
    for i, out in enumerate(outs):
        for j, same in enumerate(outs):
            assert torch.equal(out, same) == (i % len(ropes) == j % len(ropes))
    assert torch.equal(attention(q, k, v, rope=Rope(6, positions=PLACES.repeat(1, 1, 2), axes=SECTIONS)), outs[0])


def test_dynamic_ntk():
    """θ is multiplied by (f·n/L - (f - 1))^(width / (width - 2)), from L positions on."""
    q, k, v = (x.detach() for x in inputs())
    for positions, factor in ((50, 1.0), (100, 1.0), (KEYS * 10, 3 * KEYS / 10 - 2)):
        rope = Rope(6, 100.0, scaling=RopeScaling.dynamic_ntk(3.0, 100, positions))
        expected = Rope(6, 100.0 * factor**1.5)
        torch.testing.assert_close(attention(q, k, v, rope=rope), attention(q, k, v, rope=expected))
    with pytest.raises(ValueError, match="original_positions"):
        RopeScaling.dynamic_ntk(3.0, 0, 100)


def test_yarn_mscale():
    """DeepSeek V3 configures the factor 40 with mscale 1."""
    assert yarn_mscale(40) == pytest.approx(1 + 0.1 * math.log(40), rel=1e-15)
    assert yarn_mscale(40, 0.707) == pytest.approx(1 + 0.0707 * math.log(40), rel=1e-15)
    assert yarn_mscale(1) == yarn_mscale(0.5) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_of_infinity_counts_in_n_beside_any_mask(dtype):
    """The mask alone decides n. A key with a bias of -inf has weight 0 and counts."""
    q, k, v = inputs()
    bias = torch.where(MATRIX, BIAS.detach(), -torch.inf).requires_grad_()
    bias.data[..., 0] = 0  # every query keeps a key
    zeros = torch.zeros(QUERIES, KEYS, dtype=dtype)
    lowest = zeros.masked_fill(~MATRIX[0, 0].roll(1), torch.finfo(dtype).min)
    lowest[:, 0] = 0
    rows = MATRIX[:, :, :1].clone()
    rows[..., 0] = True
    for given, seen in [
        (None, {}),
        (mask.MatrixMask(zeros), {}),
        (mask.MatrixMask(lowest), dict(matrix=lowest == 0)),
        (mask.Causal() & lowest & rows, dict(causal=True, matrix=(lowest == 0) & rows)),
    ]:
        ours = attention(q, k, v, scaling=scaling.SSMax(S), mask=given, score=score.Bias(bias), return_lse=True)
        visible = reference.visible(*shape_of_seen(), **seen)
        multiplier = S[:, None] * visible.sum(-1).double().log()
        finite = torch.where(bias == -torch.inf, 0, bias)
        weighted = visible & (bias > -torch.inf)
        theirs = reference.attention(q, k, v, weighted, lambda n, p, c=multiplier: c, bias=finite)
        check(ours, theirs, [q, k, v, S, bias])


SHOWN = {
    "Softmax()": scaling.Softmax(),
    "LogN()": scaling.LogN(),
    "SSMax(s=Tensor([4], float64), b=0.0)": scaling.SSMax(S),
    "SizeTable(p=Tensor([37], float64), s=1.0, b=0.0)": scaling.SizeTable(P),
    "QwenLogN(trained_length=20)": scaling.QwenLogN(20),
    "Llama4Temperature(scale=0.1, floor_length=8192)": scaling.Llama4Temperature(),
    "MinistralTemperature(scale=0.1, trained_length=16384)": scaling.MinistralTemperature(),
    "InklingTemperature(alpha=0.1, floor_length=128000)": scaling.InklingTemperature(),
    "Constant(multiplier=0.7)": scaling.Constant(0.7),
    "PerQuery(c=Tensor([2, 4, 21], float64))": scaling.PerQuery(C),
    "AdjustedSize(scaling=LogN(), offset=1, floor=2)": scaling.AdjustedSize(scaling.LogN(), 1, 2),
    "Mask()": mask.Mask(),
    "Causal()": mask.Causal(),
    "SlidingWindow(left=5, right=2)": mask.SlidingWindow(5, 2),
    "PrefixLM(prefix=Tensor([2], int64))": mask.PrefixLM([1, 2]),
    "LeftPadding(padding=Tensor([2], int64))": mask.LeftPadding([1, 2]),
    "Causal() & KeyLengths(lengths=Tensor([2], int64))": mask.Causal() & mask.KeyLengths([1, 2]),
    "Chunks(size=7)": mask.Chunks(7),
    "CausalTopLeft() & SlidingWindow(left=5, right=0)": mask.CausalTopLeft() & mask.SlidingWindow(5),
    "Documents(cu_seqlens=Tensor([3], int64), causal=True)": mask.Documents([0, 1, 2]),
    "Documents(cu_seqlens=Tensor([2], int64), cu_seqlens_keys=Tensor([2], int64), causal=False)": mask.Documents(
        [0, 1], cu_seqlens_keys=[0, 2], causal=False
    ),
    "MatrixMask(matrix=Tensor([1, 4, 21, 37], bool))": mask.MatrixMask(MATRIX),
    "MatrixMask(matrix=Tensor([1, 1, 21, 37], float64))": mask.MatrixMask(ADDITIVE),
    "MatrixMask(matrix=Tensor([1, 4, 21, 37], bool), modulo=True)": mask.MatrixMask(MATRIX, modulo=True),
    "Bias(bias=Tensor([2, 1, 1, 37], float64), modulo=True)": score.Bias(BIAS_OF_KEYS, modulo=True),
    "Softcap(cap=0.7)": score.Softcap(0.7),
    "ScaleInvariant(tau=10.0)": score.ScaleInvariant(),
    "Softcap(cap=0.7) | Alibi(slopes=Tensor([4], float64), absolute=True)": score.Softcap(0.7)
    | score.Alibi(SLOPES, absolute=True),
    "SlopedBias(bias=Tensor([1, 4, 21, 37], bool), slopes=Tensor([2], float32))": score.SlopedBias(MATRIX, torch.ones(2)),
    "Score()": score.Score(),
    "Alibi(slopes=Tensor([4], float64)) | Bias(bias=Tensor([2, 1, 1, 37], float64))": score.Alibi(SLOPES)
    | score.Bias(BIAS_OF_KEYS),
}


@pytest.mark.parametrize("text", SHOWN)
def test_repr(text):
    assert repr(SHOWN[text]) == text
