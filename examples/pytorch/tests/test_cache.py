"""KVCache: decoding token by token equals attention over all tokens at once."""

import pytest
import torch

from ssmax_torch import KVCache, Rope, attention, mask, scaling


def inputs(length, dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    return [torch.rand(batch, heads, length, 16, dtype=dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rope", [None, Rope(16)])
def test_decode_equals_attention(dtype, rope):
    q, k, v = inputs(50, dtype)
    s = scaling.SSMax(torch.rand(4))
    expected = attention(q, k, v, scaling=s, mask=mask.Causal(), rope=rope)
    cache = KVCache(2, 2, 16, capacity=64, dtype=dtype, rope=rope)
    outs = []
    for begin, end in [(0, 30), (30, 31), (31, 33), (33, 50)]:
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
        outs.append(cache.decode(q[:, :, begin:end], scaling=s))
    torch.testing.assert_close(torch.cat(outs, 2), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_cache_of_16_bits(stored):
    q, k, v = inputs(40)
    cache = KVCache(2, 2, 16, capacity=64, dtype=stored)
    cache.append(k, v)
    exact = attention(q[:, :, -3:], k.to(stored).float(), v.to(stored).float(), mask=mask.Causal())
    torch.testing.assert_close(cache.decode(q[:, :, -3:]), exact, atol=1e-6, rtol=1e-5)


def test_ragged_ring():
    q, k, v = inputs(40)
    cache = KVCache(2, 2, 16, capacity=16, ring=True)
    lengths = [0, 0]
    window = mask.SlidingWindow(7)
    for counts in ([5, 3], [20, 4], [1, 16], [1, 1]):
        new = max(counts)
        pieces = []
        for x in (k, v):
            piece = torch.zeros(2, 2, new, 16)
            for b, count in enumerate(counts):
                piece[b, :, :count] = x[b, :, lengths[b] : lengths[b] + count]
            pieces.append(piece)
        cache.append(*pieces, counts)
        lengths = [length + count for length, count in zip(lengths, counts)]
        last = torch.stack([q[b, :, lengths[b] - 1 : lengths[b]] for b in range(2)])
        out = cache.decode(last, mask=window)
        for b, length in enumerate(lengths):
            one = slice(b, b + 1)
            alone = attention(last[one], k[one, :, :length], v[one, :, :length], mask=window)
            torch.testing.assert_close(out[one], alone, atol=1e-6, rtol=1e-5)
    assert cache.lengths.tolist() == lengths


def test_what_does_not_fit_changes_nothing():
    cache = KVCache(1, 1, 8, capacity=4)
    x = torch.rand(1, 1, 3, 8)
    cache.append(x, x)
    held = cache.keys.clone()
    for key, value, counts in [
        (x, x, None), (x[..., :4], x, None), (x, x[:, :, :2], None), (x, x, [4]), (x, x, [-1]), (x, x, [1, 1]), (x[0], x, None),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            cache.append(key, value, counts)
    assert cache.lengths.tolist() == [3] and torch.equal(cache.keys, held)
    with pytest.raises(ValueError, match="positions"):
        cache.decode(torch.rand(1, 1, 4, 8))
    cache.truncate(0, 1)
    assert cache.lengths.tolist() == [1]
    with pytest.raises(ValueError, match="length"):
        cache.truncate(0, 2)


def filled(x, **what):
    cache = KVCache(1, 2, 8, capacity=4)
    cache.append(x, x)
    return cache.decode(x.detach(), **what)


def of_query(query):
    cache = KVCache(1, 2, 8, capacity=4)
    cache.append(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    return cache.decode(query)


X = torch.ones(1, 2, 3, 8)


@pytest.mark.parametrize("name, call", [
    ("decode", lambda: of_query(X.clone().requires_grad_())),
    ("decode", lambda: filled(X, scaling=scaling.SSMax(torch.ones(2, requires_grad=True)))),
    ("decode", lambda: filled(X, sinks=torch.ones(2, requires_grad=True))),
    ("append", lambda: filled(X.clone().requires_grad_())),
    ("decode", lambda: torch.func.grad(lambda x: of_query(x).sum())(X)),
    ("decode", lambda: torch.func.jvp(of_query, (X,), (X,))),
    ("append", lambda: torch.func.jvp(filled, (X,), (X,))),
])  # fmt: skip
def test_derivatives_are_refused(name, call):
    with pytest.raises(NotImplementedError, match=f"ssmax_torch.KVCache.{name}: derivatives are not implemented"):
        call()


def test_without_derivatives():
    with torch.no_grad():
        assert torch.equal(of_query(X.clone().requires_grad_()), of_query(X))
        assert not filled(X.clone().requires_grad_()).requires_grad
