"""Compares results for types, strides and shapes to float64, and tests that tensors are not copied."""

import pytest
import reference
import torch

from ssmax_torch import attention, mask, scaling

# Error bounds of out for small logits. For 16-bit types: a few roundings of a result near 1.
TYPES = [(torch.float32, 2e-6), (torch.float64, 1e-13), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


def inputs(dtype=torch.float32, heads=4, kv_heads=2, queries=40, keys=40, width=16, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, width)]
    return [torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("s_type", [torch.float32, torch.float64, torch.bfloat16])
def test_types(dtype, tolerance, s_type):
    given = [x.requires_grad_() for x in inputs(dtype)]
    s = torch.tensor([0.25, 0.5, 0.375, 1.0], dtype=s_type, requires_grad=True)
    out, lse = attention(*given, scaling=scaling.SSMax(s), mask=mask.Causal(), return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (*given, s)]
    seen = reference.visible(2, 4, 40, 40, causal=True)
    expected, _ = reference.attention(*exact[:3], seen, lambda n, p: exact[3][:, None] * n.log())
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    generator = torch.Generator().manual_seed(1)  # numbers other than query's
    weights = torch.rand(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
    ours = torch.autograd.grad(out, [*given, s], weights)
    theirs = torch.autograd.grad(expected, exact, weights.double())
    for mine, other, of in zip(ours, theirs, [*given, s], strict=True):
        assert mine.dtype == of.dtype
        # Each gradient is a sum of at most 80 such results (ds: over the queries of a head), rounded to its own type.
        rounding = torch.finfo(of.dtype).eps
        torch.testing.assert_close(mine.double(), other, atol=80**0.5 * tolerance, rtol=rounding)


def test_out_is_laid_out_as_query():
    q, k, v = inputs()
    expected = attention(q, k, v)
    assert expected.is_contiguous()
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out = attention(*apart)
    assert out.transpose(1, 2).is_contiguous() and torch.equal(out, expected)
    apart[0].requires_grad_()
    attention(*apart).sum().backward()
    assert apart[0].grad.transpose(1, 2).is_contiguous()


def test_strides_need_no_copy():
    """Columns of a packed projection, broadcast batches and rows with gaps: results are bit-identical."""
    packed = torch.rand(2, 40, 3, 4, 16)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    assert torch.equal(attention(q, k, v), attention(*(x.contiguous() for x in (q, k, v))))
    one = torch.rand(1, 1, 40, 16)
    k = v = one.expand(2, 2, 40, 16)
    assert torch.equal(attention(q, k, v), attention(q, k.contiguous(), v.contiguous()))
    wide = torch.rand(2, 4, 80, 48)[:, :, ::2, 8:24]
    assert torch.equal(attention(wide, k, v), attention(wide.contiguous(), k, v))


@pytest.mark.parametrize("queries, keys, heads, kv_heads, batch", [
    (0, 5, 2, 1, 1), (5, 0, 2, 1, 1), (3, 3, 0, 0, 1), (3, 3, 2, 2, 0), (1, 1, 1, 1, 1), (1, 70, 8, 1, 2), (9, 4, 2, 2, 1),
])  # fmt: skip
def test_extents(queries, keys, heads, kv_heads, batch):
    given = [x.double().requires_grad_() for x in inputs(torch.float32, heads, kv_heads, queries, keys, 8, batch)]
    out, lse = attention(*given, mask=mask.Causal(), return_lse=True)
    assert out.shape == (batch, heads, queries, 8) and lse.shape == (batch, heads, queries)
    if heads > 0:
        seen = reference.visible(batch, heads, queries, keys, causal=True)
        if keys > 0:
            expected, _ = reference.attention(*given, seen, lambda n, p: torch.ones_like(n))
            torch.testing.assert_close(out, expected)
        else:
            assert (out == 0).all() and (lse == -torch.inf).all()
    for gradient, of in zip(torch.autograd.grad(out.sum(), given), given, strict=True):
        assert gradient.shape == of.shape


def test_hidden_nan_stays_hidden():
    q, k, v = inputs()
    k[1, :, 20:], v[1, :, 20:] = torch.nan, torch.nan
    q.requires_grad_()
    out = attention(q, k, v, mask=mask.KeyLengths([40, 20]))
    assert out.isfinite().all()
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_threads_do_not_change_a_bit():
    given = [x.requires_grad_() for x in inputs(queries=200, keys=200)]
    s = torch.rand(4, requires_grad=True)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = attention(*given, scaling=scaling.SSMax(s), mask=mask.Causal())
            results.append((out, *torch.autograd.grad(out.square().sum(), [*given, s])))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
