"""Compares attention to its formula in float64."""

import pytest
import torch

import ssmax_torch
from ssmax_torch import mask, scaling


def reference(q, k, v, s, b):
    """Returns causal attention with SSMax by its formula."""
    heads, keys, width = q.shape[1], k.shape[2], q.shape[3]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    z = q @ k.transpose(2, 3) / width**0.5
    n = torch.arange(1, keys + 1, dtype=z.dtype)[:, None]
    c = s[:, None, None] * n.log() + b[:, None, None]
    visible = torch.ones(keys, keys, dtype=torch.bool).tril()
    return (c * z).masked_fill(~visible, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_causal_ssmax_and_its_gradients(dtype, tolerance):
    torch.manual_seed(0)
    shapes = [(2, 4, 50, 16), (2, 2, 50, 16), (2, 2, 50, 16), (4,), (4,)]
    exact = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, k, v, s, b = given = [x.detach().to(dtype).requires_grad_() for x in exact]
    out = ssmax_torch.attention(q, k, v, scaling=scaling.SSMax(s, b), mask=mask.Causal())
    expected = reference(*exact)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, given, gradient.to(dtype))
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, exact, gradient), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=10 * tolerance, rtol=10 * tolerance)
