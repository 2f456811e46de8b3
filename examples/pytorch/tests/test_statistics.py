"""Statistics of attention's rows, compared to formulas in float64."""

import pytest
import reference
import torch
from torch.library import opcheck

from ssmax_torch import KVCache, RowStatistics, SSMax, attention, attention_varlen, mask, scaling, score
from ssmax_torch._arguments import arguments

# Bounds of errors for logits of at most 3. bfloat16: weights are rounded to bfloat16 on the bf16 path.
TYPES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-5}
OPTIONS = dict(scaling=scaling.SSMax(0.4), mask=mask.Causal(), score=score.Softcap(3.0))


def inputs(dtype=torch.float64, queries=40, keys=40, width=16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, width), (2, 2, keys, width), (2, 2, keys, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def expected_statistics(q, k, seen, c, cap=None, sinks=None):
    """Returns the statistics by their formulas. c is the multiplier, [queries, 1]."""
    q, k = (x.detach().double() for x in (q, k))
    z = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[3] ** 0.5
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    logits = (c * z).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(2, -1, q.shape[2], 1)], -1)
    p = logits.softmax(-1).nan_to_num(0)[..., : k.shape[2]]
    largest, smallest = (z.masked_fill(~seen, x * torch.inf) for x in (-1, 1))
    return RowStatistics(largest.amax(-1), smallest.amin(-1), p.square().sum(-1), -torch.xlogy(p, p).sum(-1))


def check(mine, other, tolerance):
    for name, a, b in zip(RowStatistics._fields, mine, other, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("queries, keys", [(40, 40), (1, 40), (30, 200)])
@pytest.mark.parametrize("dtype", TYPES)
def test_statistics(dtype, queries, keys):
    q, k, v = inputs(dtype, queries, keys)
    out, lse, statistics = attention(q, k, v, **OPTIONS, return_lse=True, return_statistics=True)
    assert isinstance(statistics, RowStatistics)
    for x in statistics:
        assert x.shape == (2, 4, queries) and x.dtype == lse.dtype and not x.requires_grad
    n = torch.arange(keys - queries + 1, keys + 1, dtype=torch.float64)[:, None]
    seen = reference.visible(2, 4, queries, keys, causal=True)
    check(statistics, expected_statistics(q, k, seen, 0.4 * n.log(), cap=3.0), TYPES[dtype])
    plain = attention(q, k, v, **OPTIONS, return_lse=True)
    tolerance = TYPES[dtype] if dtype != torch.float16 else 1e-3
    for mine, other in zip((out, lse), plain, strict=True):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)


def test_results():
    """return_statistics appends the statistics to the other results, and changes neither results nor gradients."""
    given = inputs()
    s = torch.full((4,), 0.5, requires_grad=True)
    what = dict(scaling=scaling.SSMax(s), mask=mask.Causal())
    out, lse = attention(*given, **what, return_lse=True)
    alone, statistics = attention(*given, **what, return_statistics=True)
    both = attention(*given, **what, return_lse=True, return_statistics=True)
    for a, b in zip((out, lse, out, *statistics), (*both[:2], alone, *both[2]), strict=True):
        assert torch.equal(a, b)
    gradients = [torch.autograd.grad(x.square().sum() + y.sum(), [*given, s]) for x, y in ((out, lse), both[:2])]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(attention(*given, **what, return_statistics=True)[1].entropy, statistics.entropy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cache_and_packed_sequences(dtype):
    """KVCache.decode and attention_varlen have the statistics of attention."""
    q, k, v = (x.detach() for x in inputs(dtype))
    cache = KVCache(2, 2, 16, capacity=48, dtype=dtype)
    cache.append(k, v)
    expected = attention(q, k, v, **OPTIONS, return_lse=True, return_statistics=True)
    out, lse, statistics = cache.decode(q, **OPTIONS, return_lse=True, return_statistics=True)
    assert isinstance(statistics, RowStatistics)
    check(statistics, expected[2], TYPES[dtype])
    torch.testing.assert_close((out, lse), expected[:2])
    out, alone = cache.decode(q, **OPTIONS, return_statistics=True)
    check(alone, statistics, 0)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out, lse, statistics = attention_varlen(
        *packed, [0, 40, 80], causal=True, **OPTIONS | dict(mask=None), return_lse=True, return_statistics=True
    )  # fmt: skip
    unpacked = [x.unflatten(-1, (2, 40)).transpose(0, 1) for x in (lse, *statistics)]
    torch.testing.assert_close(out, expected[0].transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(unpacked[0], expected[1])
    check(unpacked[1:], expected[2], TYPES[dtype])
    assert len(attention_varlen(*packed, [0, 40, 80], return_statistics=True)) == 2


def test_queries_without_a_visible_key():
    q, k, v = inputs()
    seen = torch.rand(40, 40) < 0.3
    seen[5] = False
    statistics = attention(q, k, v, mask=seen, return_statistics=True)[1]
    check(statistics, expected_statistics(q, k, seen.expand(2, 4, -1, -1), 1.0), 1e-12)
    for x, value in zip(statistics, (-torch.inf, torch.inf, 0, 0), strict=True):
        assert (x[:, :, 5] == value).all()
    for x in attention(q, k[:, :, :0], v[:, :, :0], return_statistics=True)[1]:
        assert x.shape == (2, 4, 40)


def test_sinks():
    q, k, v = inputs()
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0])
    statistics = attention(q, k, v, sinks=sinks, return_statistics=True)[1]
    seen = torch.ones(2, 4, 40, 40, dtype=torch.bool)
    check(statistics, expected_statistics(q, k, seen, 1.0, sinks=sinks), 1e-12)


@pytest.mark.parametrize("p", [0.3, 1])
def test_dropout_does_not_change_statistics(p):
    given = inputs()
    torch.manual_seed(0)
    out, statistics = attention(*given, **OPTIONS, dropout_p=p, return_statistics=True)
    torch.manual_seed(0)
    assert torch.equal(out, attention(*given, **OPTIONS, dropout_p=p))
    for a, b in zip(statistics, attention(*given, **OPTIONS, return_statistics=True)[1], strict=True):
        assert torch.equal(a, b)


def test_module_and_autocast():
    given = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, statistics = SSMax(4)(*given, mask=mask.Causal(), return_statistics=True)
    assert out.dtype == torch.bfloat16 and statistics.largest.dtype == torch.float32


def test_gradcheck():
    q, k, v = (x.detach()[:1, :, :3, :4].requires_grad_() for x in inputs())
    assert torch.autograd.gradcheck(lambda *x: attention(*x, **OPTIONS, return_lse=True, return_statistics=True)[:2], (q, k, v))


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_opcheck(options):
    what = dict.fromkeys(["scaling", "mask", "score", "sinks", "rope", "scale"]) | dict(scaled_sinks=False) | options
    q, k, v = inputs(torch.float32, 12, 12, 8)
    opcheck(torch.ops.ssmax.attention_statistics.default, (q, k, v, *arguments(q, **what)))
    cache = (q.detach(), k.detach(), v.detach(), torch.tensor([12, 12]), False)
    opcheck(torch.ops.ssmax.decode_statistics.default, (*cache, *arguments(q, **what | dict(mask=mask.Causal()))))


def test_compile_without_a_break():
    def call(q, k, v):
        out, statistics = attention(q, k, v, **OPTIONS, return_statistics=True)
        return out, statistics.largest.amax((0, 2))

    given = inputs()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        out, largest = function(*given)
        results.append((out, largest, *torch.autograd.grad(out.square().sum(), given)))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


def test_func_grad_and_vmap():
    q, k, v = (x.detach() for x in inputs())

    def loss(q):
        out, statistics = attention(q, k, v, **OPTIONS, return_statistics=True)
        return out.square().sum(), statistics

    stacked = torch.stack([q, 2 * q, -q])
    gradients, statistics = torch.func.vmap(torch.func.grad(loss, has_aux=True))(stacked)
    for i, one in enumerate(stacked):
        gradient, expected = torch.func.grad(loss, has_aux=True)(one)
        torch.testing.assert_close(gradients[i], gradient)
        check([x[i] for x in statistics], expected, 1e-12)


def test_second_derivatives_are_refused():
    q, k, v = inputs()
    out, _ = attention(q, k, v, return_statistics=True)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="ssmax_torch.attention: the second derivative"):
        first.square().sum().backward()


def test_meta_tensors_have_shapes():
    q, k, v = (x.to("meta") for x in inputs(torch.bfloat16))
    out, statistics = attention(q, k, v, return_statistics=True)
    assert out.shape == q.shape and all(x.shape == (2, 4, 40) and x.dtype == torch.float32 for x in statistics)
