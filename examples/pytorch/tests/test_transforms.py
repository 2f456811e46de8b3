"""torch.func, forward-mode and second derivatives, autocast, the count of operations."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import ssmax_torch
from ssmax_torch import attention, mask, scaling, score


def inputs():
    torch.manual_seed(0)
    return torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)


Q, K, V = inputs()


def out_of(query):
    return attention(query, K, V, mask=mask.Causal())


def gradient(loss, *at):
    at = [x.clone().requires_grad_() for x in at]
    return torch.autograd.grad(loss(*at), at)


def dual_level(query):
    with forward_ad.dual_level():
        return out_of(forward_ad.make_dual(query, torch.ones_like(query)))


@pytest.mark.parametrize("call", [
    lambda: torch.func.jvp(out_of, (Q,), (torch.ones_like(Q),)),
    lambda: torch.func.jvp(lambda s: attention(Q, K, V, scaling=scaling.SSMax(s)), (torch.ones(2),), (torch.ones(2),)),
    lambda: torch.func.jacfwd(out_of)(Q),
    lambda: dual_level(Q),
    lambda: dual_level(Q.clone().requires_grad_()),
    lambda: torch.compile(lambda: torch.func.jvp(out_of, (Q,), (torch.ones_like(Q),)), backend="eager")(),
])  # fmt: skip
def test_forward_mode_is_refused(call):
    with pytest.raises(NotImplementedError, match="ssmax_torch.attention: forward-mode derivatives"):
        call()


def test_forward_mode_elsewhere():
    """Attention works inside a dual level if its arguments have no tangent."""
    with forward_ad.dual_level():
        assert torch.equal(out_of(Q), attention(Q, K, V, mask=mask.Causal()))


def penalty(query):
    query = query.clone().requires_grad_()
    (first,) = torch.autograd.grad(out_of(query).sum(), query, create_graph=True)
    first.square().sum().backward()


@pytest.mark.parametrize("call", [
    lambda: penalty(Q),
    lambda: torch.autograd.functional.hessian(lambda q: out_of(q).sum(), Q),
    lambda: torch.func.grad(lambda q: torch.func.grad(lambda x: out_of(x).sum())(q).sum())(Q),
    lambda: torch.func.jacrev(torch.func.grad(lambda q: out_of(q).sum()))(Q),
])  # fmt: skip
def test_second_derivatives_are_refused(call):
    with pytest.raises(NotImplementedError, match="ssmax_torch.attention: the second derivative"):
        call()


def test_create_graph_alone():
    """A first derivative has the same value with and without create_graph."""
    query = Q.clone().requires_grad_()
    (first,) = torch.autograd.grad(out_of(query).sum(), query, create_graph=True)
    assert torch.equal(first.detach(), gradient(lambda q: out_of(q).sum(), Q)[0])


def test_func_grad():
    s = torch.rand(2)

    def loss(q, k, v, s):
        out, lse = attention(q, k, v, scaling=scaling.SSMax(s), mask=mask.Causal(), return_lse=True)
        return out.square().sum() + lse.sum()

    expected = gradient(loss, Q, K, V, s)
    for mine, other in zip(torch.func.grad(loss, argnums=(0, 1, 2, 3))(Q, K, V, s), expected, strict=True):
        assert torch.equal(mine, other)


def test_func_vjp():
    out, pull = torch.func.vjp(lambda q: out_of(q), Q)
    assert torch.equal(out, out_of(Q))
    assert torch.equal(pull(V)[0], gradient(lambda q: (out_of(q) * V).sum(), Q)[0])


STACKED = torch.stack([Q, 2 * Q, -Q]).repeat(1, 2, 1, 1, 1)  # [3, 2, 2, 5, 4]
KEYS, VALUES = STACKED.flip(0) + 1, STACKED.roll(1, -1)
BIAS = torch.rand(3, 2, 2, 5, 5)

# What is mapped, and its dimension: query, key, value and one more tensor.
MAPPED = {
    "query": (0, None, None, None, lambda x: {}),
    "all": (0, 0, 0, None, lambda x: dict(mask=mask.Causal(), scaling=scaling.SSMax(0.5))),
    "other dimensions": (2, 4, 3, None, lambda x: {}),
    "lengths": (0, 0, 0, torch.tensor([[5, 2], [3, 0], [1, 4]]), lambda x: dict(mask=mask.KeyLengths(x))),
    "lengths of one": (0, None, 0, None, lambda x: dict(mask=mask.KeyLengths([5, 2]))),
    "a matrix": (0, 0, 0, BIAS[:, 0, 0] < 0.7, lambda x: dict(mask=x)),
    "an additive mask": (0, 0, 0, BIAS[:, :, :1], lambda x: dict(mask=x)),
    "a matrix of one": (0, 0, 0, None, lambda x: dict(mask=BIAS[0, :, :1] < 0.7)),
    "a bias": (0, 0, 0, BIAS[:, 0], lambda x: dict(score=score.Bias(x), scaling=scaling.PerQuery(BIAS[0, :, :, 0]))),
    "c": (None, 0, 0, BIAS[..., 0], lambda x: dict(scaling=scaling.PerQuery(x))),
    "positions": (0, 0, 0, torch.randint(9, (3, 2, 5)), lambda x: dict(rope=ssmax_torch.Rope(4, positions=x))),
    "positions of one": (0, None, 0, None, lambda x: dict(rope=ssmax_torch.Rope(4, positions=[[3, 1, 4, 1, 5]] * 2))),
    "axes": (0, 0, 0, torch.randint(9, (3, 2, 1, 5)), lambda x: dict(rope=ssmax_torch.Rope(4, positions=x, axes=[0, 1]))),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_one_call(name, compiled, monkeypatch):
    *dims, extra, options = MAPPED[name]
    stacks = [STACKED, KEYS, VALUES]
    given = [x[0] if d is None else x.movedim(0, d) for x, d in zip(stacks, dims)]
    dims.append(None if extra is None else 0)

    def loss(q, k, v, extra):
        out, lse = attention(q, k, v, **options(extra), return_lse=True)
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum(), (out, lse)

    from ssmax_torch import _vmap

    calls = []
    for operator in ("attention", "attention_backward"):
        call = getattr(torch.ops.ssmax, operator)
        monkeypatch.setattr(_vmap, f"_{operator}", lambda *x, c=call, n=operator: calls.append(n) or c(*x))
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True), in_dims=tuple(dims))
    if compiled:
        torch._dynamo.reset()  # else the cases reach the limit of recompilations
        mapped = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    results = mapped(*given, extra)
    assert compiled or calls == ["attention", "attention_backward"]
    for i in range(3):
        one = [x if d is None else x.select(d, i).contiguous() for x, d in zip((*given, extra), dims)]
        gradients, outs = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(*one)
        for mine, other in zip(results[0] + results[1], gradients + outs, strict=True):
            torch.testing.assert_close(mine[i], other)


@pytest.mark.parametrize("argnums", [0, (0, 1, 2, 3)])
def test_compiled_grad(argnums):
    s = torch.rand(2)

    def loss(q, k, v, s):
        out, lse = attention(q, k, v, scaling=scaling.SSMax(s), mask=mask.Causal(), return_lse=True)
        return out.square().sum() + lse.sum()

    gradients = torch.func.grad(loss, argnums)
    compiled = torch.compile(gradients, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, K, V, s), gradients(Q, K, V, s))


def test_grad_of_vmap():
    """Gradients of tensors outside of the mapped function, also of those that are not mapped."""
    s = torch.rand(2)

    def loss(q, k, s, each):
        outs = each(lambda q: attention(q, k, V, scaling=scaling.SSMax(s), mask=mask.Causal()), q)
        return outs.square().sum()

    queries = STACKED[:, :1]
    expected = gradient(lambda *x: loss(*x, lambda f, q: torch.stack([f(one) for one in q])), queries, K, s)
    for mine, other in zip(gradient(lambda *x: loss(*x, lambda f, q: torch.func.vmap(f)(q)), queries, K, s), expected):
        torch.testing.assert_close(mine, other)


def test_nested_vmap():
    stacked = torch.stack([STACKED, STACKED + 1])
    k, v = K.expand(2, -1, -1, -1), V.expand(2, -1, -1, -1)
    out = torch.func.vmap(torch.func.vmap(lambda q: attention(q, k, v)))(stacked)
    expected = [[attention(q, k, v) for q in queries] for queries in stacked]
    torch.testing.assert_close(out, torch.stack([torch.stack(x) for x in expected]))


def test_vmap_of_grad():
    queries, s = torch.stack([Q, 2 * Q, -Q]), torch.tensor([0.5, 1.5])

    def loss(q, s):
        return attention(q, K, V, scaling=scaling.SSMax(s), mask=mask.Causal()).square().sum()

    for i, mine in enumerate(torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(queries, s)):
        for one, q in zip(mine, queries, strict=True):
            torch.testing.assert_close(one, gradient(loss, q, s)[i])


def test_func_of_a_module():
    module = ssmax_torch.SSMax(2, bias=True)
    parameters = {name: x.detach() for name, x in module.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (Q, K, V)).square().sum()

    module(Q, K, V).square().sum().backward()
    for name, mine in torch.func.grad(loss)(parameters).items():
        assert torch.equal(mine, getattr(module, name).grad)


@pytest.mark.parametrize("types", [
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(types, dtype):
    """out and gradients have the types of PyTorch's attention."""
    given = [x.to(kind).requires_grad_() for x, kind in zip((Q, K, V), types, strict=True)]
    with torch.autocast("cpu", dtype):
        out = ssmax_torch.scaled_dot_product_attention(*given)
        theirs = torch.nn.functional.scaled_dot_product_attention(*given)
    assert out.dtype == theirs.dtype
    tolerance = 8 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, theirs, atol=tolerance, rtol=tolerance)
    mine, other = (torch.autograd.grad(x.sum(), given) for x in (out, theirs))
    assert [x.dtype for x in mine] == [x.dtype for x in other] == list(types)


def test_autocast_refuses_float64_beside_others():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="key has dtype bfloat16, must be float64"):
        attention(Q.double(), K, V)


def test_flop_counter():
    """Counts the same FLOP as PyTorch for its own attention: every product, also of masked keys."""
    q, k, v = (torch.rand(2, heads, n, d, requires_grad=True) for heads, n, d in ((4, 5, 8), (2, 6, 8), (2, 6, 3)))
    with FlopCounterMode(display=False) as forward:
        out = attention(q, k, v, mask=mask.Causal())
    assert forward.get_total_flops() == 2 * 2 * 4 * 5 * 6 * (8 + 3)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * 2 * 4 * 5 * 6 * (3 * 8 + 2 * 3)
    cache = ssmax_torch.KVCache(2, 2, 8, capacity=16, value_width=3)
    cache.append(k.detach(), v.detach(), counts=[6, 4])
    with FlopCounterMode(display=False) as decode:
        cache.decode(q.detach()[:, :, :1])
    assert decode.get_total_flops() == 2 * 4 * (6 + 4) * (8 + 3)
