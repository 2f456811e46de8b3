"""Dropout of weights. Values that are the identity return the weights, and so the mask of dropout."""

import pytest
import reference
import torch
from torch.utils.checkpoint import checkpoint

from ssmax_torch import (
    MultiheadAttention,
    attention,
    attention_varlen,
    mask,
    scaled_dot_product_attention,
    scaling,
    score,
)


def inputs(dtype=torch.float64, batch=2, heads=4, kv_heads=2, queries=33, keys=41, width=8):
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, width)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def weights(q, k, seed=0, **what):
    """Returns the weights [batch, heads, queries, keys] of a call after manual_seed(seed)."""
    torch.manual_seed(seed)
    identity = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:3], -1)
    return attention(q, k, identity, **what)


def rounded(p):
    return round(p * 65536) / 65536


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shown", [None, mask.Causal()])
def test_weights(p, dtype, shown):
    """A weight becomes 0 with probability p; the others are divided by 1 - p. Batch entries and heads have own masks."""
    q, k, _ = inputs(dtype)
    full, dropped = weights(q, k, mask=shown), weights(q, k, mask=shown, dropout_p=p)
    kept = dropped != 0
    tolerance = max(1e-6, 2 * torch.finfo(dtype).eps)
    expected = torch.where(kept, full / (1 - rounded(p)), 0)
    torch.testing.assert_close(dropped, expected, atol=tolerance / (1 - p), rtol=tolerance)
    visible = full != 0
    count = visible.sum().item()
    assert abs(kept.sum().item() - count * (1 - p)) < 5 * (count * p * (1 - p)) ** 0.5
    masks = (kept | ~visible).flatten(0, 1)
    assert len({tuple(x.flatten().tolist()) for x in masks}) == len(masks)


def test_seed():
    """manual_seed makes a call reproducible. The next call drops other weights. A call without dropout draws no seed."""
    q, k, v = inputs()
    first, again = weights(q, k, dropout_p=0.5), weights(q, k, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, weights(q, k, seed=1, dropout_p=0.5))
    torch.manual_seed(0)
    both = [attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*both)
    state = torch.get_rng_state()
    attention(q, k, v)
    scaled_dot_product_attention(q, q, q)
    assert torch.equal(torch.get_rng_state(), state)


def test_seed_of_your_own():
    """A seed draws no number from the generator. Seed and offset choose the weights."""
    q, k, v = inputs()
    state = torch.get_rng_state()
    seed = torch.randint(2**63 - 1, (1,))
    torch.set_rng_state(state)
    expected = attention(q, k, v, dropout_p=0.5)
    state = torch.get_rng_state()
    for given in (seed, seed.reshape(()), seed.item()):
        assert torch.equal(attention(q, k, v, dropout_p=0.5, dropout_seed=given), expected)
    choices = [(0, 0), (1, 0), (2**32, 0), (2**64 - 1, 0), (0, 1), (0, 2**32), (0, 2**64 - 1)]
    outs = [attention(q, k, v, dropout_p=0.5, dropout_seed=a, dropout_offset=b) for a, b in choices]
    assert not any(torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])
    assert torch.equal(attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor(-1)), outs[3])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_seeds_of_batch_mates(dtype):
    """With a seed for each batch entry, out and gradients do not depend on other entries. With one seed, they do."""
    given = [x.requires_grad_() for x in inputs(dtype, batch=3)]
    seeds = torch.tensor([7, -(2**62), 7])

    def call(at, seeds):
        part = [x.detach()[at].requires_grad_() for x in given]
        what = dict(dropout_p=0.4, dropout_seed=seeds, dropout_offset=5, mask=mask.Causal())
        out = attention(*part, **what)
        return out, *torch.autograd.grad(out.float().square().sum(), part)

    for at in ([0], [1], [2], [2, 0], [1, 2]):
        for mine, alone in zip(call(slice(None), seeds), call(at, seeds[at]), strict=True):
            assert torch.equal(mine[at], alone)
    assert torch.equal(call([0], 7)[0], call([0], torch.tensor([7]))[0])
    same = torch.stack([given[0][0]] * 2), *(torch.stack([x[0]] * 2) for x in given[1:])
    assert torch.equal(*attention(*same, dropout_p=0.4, dropout_seed=torch.tensor([7, 7])))
    assert not torch.equal(*attention(*same, dropout_p=0.4, dropout_seed=7))


def test_seed_of_a_cut_prompt():
    """A prompt that is cut into calls drops the weights of one call, also in the backward."""
    q, k, v = (x.requires_grad_() for x in inputs(queries=41))
    what = dict(mask=mask.Causal(), dropout_p=0.5, dropout_seed=torch.tensor([3, 4]))
    whole = attention(q, k, v, **what)
    parts = [attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], **what) for a, b in ((0, 7), (7, 8), (8, 30), (30, 41))]
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (whole, torch.cat(parts, 2))]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 41), (33, 41), (41, 7), (130, 257)])
def test_gradients(queries, keys):
    """out, lse and gradients are those of plain PyTorch with the same mask. lse is without dropout."""
    given = [x.requires_grad_() for x in inputs(queries=queries, keys=keys)]
    s = torch.rand(4, dtype=torch.float64, requires_grad=True)
    what = dict(scaling=scaling.SSMax(s), score=score.Softcap(3.0))
    with torch.no_grad():
        kept = weights(*given[:2], dropout_p=0.3, **what) != 0
    torch.manual_seed(0)
    out, lse = attention(*given, dropout_p=0.3, return_lse=True, **what)
    q, k, v = given
    identity = torch.eye(keys, dtype=torch.float64).expand(2, 2, -1, -1)
    seen = reference.visible(2, 4, queries, keys)
    full, lse_expected = reference.attention(q, k, identity, seen, lambda n, p: s[:, None] * n.log(), softcap=3.0)
    expected = (full * kept / (1 - rounded(0.3))) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(lse, lse_expected, atol=1e-10, rtol=1e-10)
    factors = torch.rand_like(out), torch.rand_like(lse)
    totals = [(x * factors[0]).sum() + (y * factors[1]).sum() for x, y in ((out, lse), (expected, lse_expected))]
    for mine, other in zip(*(torch.autograd.grad(total, [*given, s]) for total in totals), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-9)


def test_gradcheck():
    def call(q, k, v, bias):
        torch.manual_seed(3)
        return attention(q, k, v, mask=mask.Causal(), score=score.Bias(bias), dropout_p=0.4, return_lse=True)

    given = inputs(batch=1, heads=2, kv_heads=1, queries=3, keys=5, width=4)
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (*given, torch.rand(3, 5, dtype=torch.float64))])


def test_everything_dropped():
    """With dropout_p = 1, out and its gradients are 0, as in PyTorch. lse and its gradient remain."""
    q, k, v = (x.requires_grad_() for x in inputs(kv_heads=4))
    out = scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=1.0))
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    out, lse = attention(q, k, v, dropout_p=1, return_lse=True)
    assert not out.any() and torch.equal(lse, attention(q, k, v, return_lse=True)[1])
    assert torch.autograd.grad(lse.sum(), q)[0].any()


@pytest.mark.parametrize("p", [1e-9, 0.99999])
def test_probabilities_near_0_and_1(p):
    """p is rounded to a multiple of 1/65536, at most 65535/65536."""
    q, k, _ = inputs()
    full, dropped = weights(q, k), weights(q, k, dropout_p=p)
    if p < 0.5:
        torch.testing.assert_close(dropped, full)
    else:
        kept = dropped != 0
        assert kept.sum() <= 10
        torch.testing.assert_close(dropped[kept], 65536 * full[kept])


def test_compile():
    """A compiled call draws its seed in the graph, without a break."""
    given = [x.requires_grad_() for x in inputs()]
    results = []
    for call in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(5)
        outs = [call(*given, dropout_p=0.5) for _ in range(2)]
        assert not torch.equal(*outs)
        results.append([*outs, *torch.autograd.grad(sum(outs).square().sum(), given)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_compile_with_a_seed():
    given = inputs()
    seeds = torch.tensor([5, 6])

    def call(*x, seeds=seeds):
        return attention(*x, dropout_p=0.5, dropout_seed=seeds), attention(*x, dropout_p=0.5, dropout_seed=3, dropout_offset=2)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for other in (seeds, seeds + 1):
        for mine, expected in zip(compiled(*given, seeds=other), call(*given, seeds=other), strict=True):
            torch.testing.assert_close(mine, expected)


def test_checkpoint():
    """Recomputation within a backward drops the same weights."""
    given = [x.requires_grad_() for x in inputs()]
    gradients = []
    for call in (attention, lambda *x, **what: checkpoint(attention, *x, use_reentrant=False, **what)):
        torch.manual_seed(5)
        gradients.append(torch.autograd.grad(call(*given, dropout_p=0.5).square().sum(), given))
    for mine, other in zip(*gradients, strict=True):
        assert torch.equal(mine, other)


def test_vmap():
    """vmap drops the same or other weights for each element, by its argument randomness."""
    q, k, v = inputs()

    def call(q):
        return torch.func.grad(lambda x: attention(x, k, v, dropout_p=0.5).square().sum())(q)

    torch.manual_seed(7)
    expected = call(q)
    torch.manual_seed(7)
    same = torch.func.vmap(call, randomness="same")(torch.stack([q, q]))
    for one in same:
        torch.testing.assert_close(one, expected)
    different = torch.func.vmap(call, randomness="different")(torch.stack([q, q]))
    assert not torch.equal(*different)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(torch.stack([q, q]))
    seeds = torch.tensor([[1, 2], [3, 4]])  # a seed draws no random number
    mapped = torch.func.vmap(lambda q, x: attention(q, k, v, dropout_p=0.5, dropout_seed=x))(torch.stack([q, q]), seeds)
    for out, x in zip(mapped, seeds, strict=True):
        torch.testing.assert_close(out, attention(q, k, v, dropout_p=0.5, dropout_seed=x))


def test_varlen():
    """A packed sequence has the weights of one batch entry with the mask Documents."""
    q, k, v = (x[0].transpose(0, 1) for x in inputs(queries=41))
    torch.manual_seed(0)
    out = attention_varlen(q, k, v, [0, 20, 41], dropout_p=0.5)
    full = (x.transpose(0, 1)[None] for x in (q, k, v))
    torch.manual_seed(0)
    expected = attention(*full, mask=mask.Documents([0, 20, 41], causal=False), dropout_p=0.5)
    assert torch.equal(out, expected[0].transpose(0, 1))
    packed = attention_varlen(q, k, v, [0, 20, 41], dropout_p=0.5, dropout_seed=3, dropout_offset=1)
    assert torch.equal(packed, attention_varlen(q, k, v, [0, 20, 41], dropout_p=0.5, dropout_seed=torch.tensor([3]), dropout_offset=1))
    assert not torch.equal(packed, out)


def test_multihead_attention(one_thread):
    """In training, dropout is the module's. In evaluation, the module drops no weight."""
    module = MultiheadAttention(32, 4, dropout=0.5)
    x = torch.rand(5, 2, 32)
    with torch.no_grad():
        full = module.eval()(x, x, x)[0]
        torch.manual_seed(0)
        outs = torch.stack([module.train()(x, x, x)[0] for _ in range(400)])
    assert not torch.equal(outs[0], outs[1])
    assert ((outs.mean(0) - full).abs() < 6 * outs.std(0) / 400**0.5).all()
    assert torch.equal(module.eval()(x, x, x)[0], full)
