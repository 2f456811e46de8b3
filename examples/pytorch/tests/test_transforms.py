"""torch.func, forward-mode and second derivatives, autocast."""

import pytest
import torch
from torch.autograd import forward_ad

import ssmax_torch
from ssmax_torch import attention, mask, scaling


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
    """Without a tangent in its arguments, attention works inside a dual level."""
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
    """A first derivative with create_graph has the value of one without."""
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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
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
