"""Merges of (out, lse), compared to attention over all keys."""

import math

import pytest
import torch
from torch.library import opcheck

from ssmax_torch import KVCache, attention, attention_varlen, mask, merge, scaling

TYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def inputs(dtype=torch.float64, batch=2, queries=5, keys=13):
    generator = torch.Generator().manual_seed(2)
    shapes = (batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 6)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def in_parts(q, k, v, at=6, **what):
    """Merges the results over the keys before and from `at`."""
    return merge(*(attention(q, k[:, :, part], v[:, :, part], return_lse=True, **what) for part in (slice(at), slice(at, None))))


@pytest.mark.parametrize("dtype", TYPES)
def test_merge(dtype):
    """out, lse and gradients are those of one call. c is that of all keys."""
    given = inputs(dtype)
    what = dict(scaling=scaling.PerQuery(torch.full((5,), 0.4 * math.log(13), dtype=torch.float64)))
    results = in_parts(*given, **what), attention(*given, scaling=scaling.SSMax(0.4), return_lse=True)
    gradients = [torch.autograd.grad(out.float().square().sum() + lse.sum(), given) for out, lse in results]
    for mine, other in zip(results[0] + gradients[0], results[1] + gradients[1], strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, atol=20 * TYPES[dtype], rtol=20 * TYPES[dtype])


def test_masked_rows():
    """A result without a visible key counts as 0, also if its out is NaN, and has no gradient."""
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True)
    nan, masked = torch.full_like(out, torch.nan).requires_grad_(), torch.full_like(lse, -torch.inf).requires_grad_()
    for results in (((out, lse), (nan, masked)), ((nan, masked), (out, lse))):
        mine = merge(*results)
        assert torch.equal(mine[0], out) and torch.equal(mine[1], lse)
        for x in torch.autograd.grad(mine[0].sum() + mine[1].sum(), (nan, masked)):
            assert not x.any()
    both = merge((nan, masked), (nan, masked))
    assert not both[0].any() and (both[1] == -torch.inf).all()
    for x in torch.autograd.grad(both[0].sum(), (nan, masked)):
        assert not x.any()


def test_packed_sequences_and_caches():
    q, k, v = (x.detach() for x in inputs(batch=1, queries=13))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    shown = torch.rand(13, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    parts = [attention_varlen(q, k, v, [0, 4, 13], mask=m, return_lse=True) for m in (shown, ~shown)]
    for mine, other in zip(merge(*parts), attention_varlen(q, k, v, [0, 4, 13], return_lse=True), strict=True):
        torch.testing.assert_close(mine, other)
    q, k, v = (x.detach() for x in inputs())
    cache = KVCache(2, 2, 8, capacity=8, value_width=6, dtype=torch.float64)
    cache.append(k[:, :, 6:], v[:, :, 6:])
    parts = attention(q, k[:, :, :6], v[:, :, :6], return_lse=True), cache.decode(q, return_lse=True)
    for mine, other in zip(merge(*parts), attention(q, k, v, mask=mask.Causal(), return_lse=True), strict=True):
        torch.testing.assert_close(mine, other)


def test_derivatives_and_transforms():
    given = [x.detach()[:1, :, :2, :3].requires_grad_() for x in inputs()]
    parts = [y.detach().requires_grad_() for part in (slice(1), slice(1, 3)) for y in attention(*given[:1], *(x[:, :, part] for x in given[1:]), return_lse=True)]

    def call(*x):
        return merge(x[:2], x[2:])

    assert torch.autograd.gradcheck(call, parts)
    assert torch.autograd.gradgradcheck(call, parts)
    opcheck(torch.ops.ssmax.merge.default, parts)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for mine, other in zip(compiled(*parts), call(*parts), strict=True):
        torch.testing.assert_close(mine, other)
    stacked = [torch.stack([x, x + 1]).detach() for x in parts]
    gradients = torch.func.vmap(torch.func.grad(lambda *x: call(*x)[0].square().sum(), argnums=(0, 1, 2, 3)))(*stacked)
    for i in range(2):
        one = [x[i].requires_grad_() for x in stacked]
        for mine, other in zip(gradients, torch.autograd.grad(call(*one)[0].square().sum(), one), strict=True):
            torch.testing.assert_close(mine[i], other)
    with pytest.raises(NotImplementedError, match="ssmax_torch.merge: forward-mode"):
        torch.func.jvp(call, tuple(stacked[i][0] for i in range(4)), tuple(stacked[i][0] for i in range(4)))


def test_errors():
    out, lse = attention(*inputs(), return_lse=True)
    for wrong, message in [
        ((out[0], lse), "shape"),
        ((out[:, :, :4], lse), "second out has shape"),
        ((out, lse[:, :1]), "second lse has shape"),
        ((out.float(), lse), "second out has dtype float32, must be float64"),
        ((out, lse.float()), "second lse has dtype float32, must be float64"),
        ((out, lse.to("meta")), "second lse is on meta"),
        ((out, 1.0), "second lse is a float"),
    ]:
        with pytest.raises((ValueError, TypeError), match=rf"ssmax_torch.merge: .*{message}"):
            merge((out, lse), wrong)
