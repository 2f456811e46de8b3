"""attention_varlen equals attention of each sequence."""

import pytest
import torch

from ssmax_torch import Rope, attention, attention_varlen, mask, scaling, score

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
SELF = [0, 5, 5, 6, 17]
QUERIES, KEYS = [0, 3, 3, 7, 7, 12], [0, 4, 9, 9, 9, 21]  # also a sequence without queries, without keys, without both


def parameter(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, dtype=torch.float64, generator=generator) - 0.3).requires_grad_()


S, B, SLOPES, SINKS = (parameter(HEADS, seed=seed) for seed in range(4))

OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "ssmax": dict(causal=True, scaling=scaling.SSMax(S, B)),
    "window": dict(causal=True, mask=mask.SlidingWindow(2), scaling=scaling.LogN()),
    "mask": dict(mask=mask.Causal(), scaling=scaling.LogN()),
    "score": dict(score=score.Softcap(3.0) | score.Alibi(SLOPES), scale=0.4),
    "sinks": dict(causal=True, sinks=SINKS, scaled_sinks=True, scaling=scaling.SSMax(S)),
    "temperature": dict(causal=True, scaling=scaling.QwenLogN(4)),
    "rope": dict(causal=True, rope=Rope(WIDTH)),
}


def each(q, k, v, cu_queries, cu_keys, causal=False, mask=None, **options):
    """Returns out and lse of one call per sequence."""
    if causal:
        mask = causal_mask if mask is None else causal_mask & mask
    outs, lses = [], []
    for i in range(len(cu_queries) - 1):
        at_q, at_k = slice(*cu_queries[i : i + 2]), slice(*cu_keys[i : i + 2])
        one = (x[at].transpose(0, 1)[None] for x, at in ((q, at_q), (k, at_k), (v, at_k)))
        out, lse = attention(*one, mask=mask, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


causal_mask = mask.Causal()


@pytest.mark.parametrize("cu_queries, cu_keys", [(SELF, None), (QUERIES, KEYS)])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_equal_separate_ones(name, cu_queries, cu_keys):
    if name == "rope" and cu_keys is not None:
        cu_keys = [0, 4, 9, 13, 15, 21]  # a rope needs as many keys as queries in each sequence
    options = OPTIONS[name]
    queries, keys = cu_queries[-1], (cu_keys or cu_queries)[-1]
    q, k = parameter(queries, HEADS, WIDTH, seed=5), parameter(keys, KV_HEADS, WIDTH, seed=6)
    v = parameter(keys, KV_HEADS, VALUE_WIDTH, seed=7)
    given = torch.tensor(cu_queries, dtype=torch.int32), None if cu_keys is None else torch.tensor(cu_keys)
    ours = attention_varlen(q, k, v, *given, return_lse=True, **options)
    theirs = each(q, k, v, cu_queries, cu_keys or cu_queries, **options)
    assert ours[0].shape == (queries, HEADS, VALUE_WIDTH) and ours[1].shape == (HEADS, queries)
    assert ours[0].is_contiguous()
    weights = parameter(*ours[0].shape, seed=8).detach()
    gradients = []
    for out, lse in (ours, theirs):
        total = (out * weights).sum() + torch.where(lse.isfinite(), lse, 0).sum()
        parameters = [q, k, v, *(x for x in (S, B, SLOPES, SINKS) if name in ("ssmax", "score", "sinks"))]
        gradients.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for mine, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)


X = torch.rand(6, 2, 8)


@pytest.mark.parametrize("call, message", [
    (lambda: attention_varlen(X[None], X, X, [0, 6]), r"query is of shape \[1, 6, 2, 8\]"),
    (lambda: attention_varlen(X, X[0], X, [0, 6]), r"key is of shape \[2, 8\]"),
    (lambda: attention_varlen(X, X, X.tolist(), [0, 6]), "value is a list"),
    (lambda: attention_varlen(X, X, X[:4], [0, 6]), "value has shape"),
    (lambda: attention_varlen(X, X, X, [0, 5]), "cu_seqlens ends with 5, queries are 6"),
    (lambda: attention_varlen(X, X, X, [0, 4, 2, 6]), "cu_seqlens falls from 4 to 2"),
    (lambda: attention_varlen(X, X, X, [0, 6], [0, 3, 6]), "cu_seqlens has extent 2, cu_seqlens_keys has 3"),
    (lambda: attention_varlen(X, X, X, [0, 6], [0, 7]), "cu_seqlens_keys ends with 7, keys are 6"),
    (lambda: attention_varlen(X, X, X, [0, 1.5, 6]), "cu_seqlens has dtype torch.float32"),
    (lambda: attention_varlen(X, X, X, [0, 6], mask=mask.KeyLengths([3])), r"mask is KeyLengths\(.*must be of Causal"),
    (lambda: attention_varlen(X, X, X, [0, 6], mask=mask.Documents([0, 6])), r"mask is Documents\(.*must be of Causal"),
])  # fmt: skip
def test_the_argument_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
