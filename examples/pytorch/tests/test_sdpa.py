"""Compares scaled_dot_product_attention to PyTorch's, also on PyTorch's own samples."""

import pytest
import torch
import torch.nn.functional as F

import ssmax_torch
from ssmax_torch import attention, mask, scaling
from ssmax_torch import scaled_dot_product_attention as ours

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def tensors(*shapes, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


def refused(function, *given, **what):
    try:
        function(*given, **what)
    except (ValueError, RuntimeError, TypeError, IndexError):
        return True
    return False


@pytest.mark.parametrize("dtype", TYPES)
def test_samples_of_pytorch(dtype):
    """Every sample has PyTorch's result. With dropout, weights are 0 or divided by 1 - p, and out is their product with
    the values."""
    from torch.testing._internal import common_methods_invocations as methods

    (info,) = [op for op in methods.op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 4 * torch.finfo(dtype).eps
    count = 0
    for sample in info.sample_inputs("cpu", dtype):
        given, what = (sample.input, *sample.args), sample.kwargs
        if p := what.get("dropout_p"):
            query, key, value, *attn_mask = (x.double() if x.is_floating_point() else x for x in given)
            identity = torch.eye(key.shape[-2], dtype=key.dtype).expand(*value.shape[:-1], -1)
            outs = []
            for values, change in ((value, {}), (identity, {}), (identity, {"dropout_p": 0.0})):
                torch.manual_seed(1)
                outs.append(ours(query, key, values, *attn_mask, **what | change))
            out, dropped, full = outs
            p = round(p * 65536) / 65536
            torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, full / (1 - p)))
            repeated = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3) if what.get("enable_gqa") else value
            torch.testing.assert_close(out, dropped @ repeated)
            what = what | {"dropout_p": 0.0}
        expected = F.scaled_dot_product_attention(*given, **what)
        torch.testing.assert_close(ours(*given, **what), expected, atol=tolerance, rtol=tolerance)
        count += 1
    assert count >= 25


SHAPES = {  # query, key, value, mask, enable_gqa
    "batch of keys": ((3, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), None, False),
    "batch of queries": ((1, 2, 5, 8), (3, 2, 6, 8), (3, 2, 6, 4), None, False),
    "batch of values": ((3, 2, 5, 8), (3, 2, 6, 8), (1, 2, 6, 8), None, False),
    "one head of keys": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8), None, False),
    "one head of values": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 1, 6, 8), None, False),
    "one head of queries": ((2, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), None, False),
    "rank 3 and 4": ((4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), None, False),
    "rank 4 and 2": ((2, 4, 5, 8), (6, 8), (6, 8), None, False),
    "rank 2 and 3": ((5, 8), (3, 6, 8), (3, 6, 8), None, False),
    "rank 5": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8), None, False),
    "rank 5, broadcast": ((2, 1, 4, 5, 8), (3, 4, 6, 8), (1, 3, 1, 6, 8), (2, 1, 1, 5, 6), False),
    "rank 6": ((2, 1, 2, 2, 5, 8), (1, 2, 2, 2, 6, 8), (2, 6, 8), (2, 1, 6), False),
    "mask of keys": ((2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (1, 6), False),
    "mask of heads": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), (4, 5, 1), False),
    "mask of rank 3": ((3, 5, 8), (3, 6, 8), (3, 6, 8), (3, 1, 6), False),
    "shared heads": ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (2, 4, 5, 6), True),
    "more heads of keys": ((2, 8, 5, 8), (2, 4, 6, 8), (2, 2, 6, 8), None, True),
    "more heads of values": ((2, 6, 5, 8), (2, 2, 6, 8), (2, 3, 6, 8), None, True),
    "shared heads, rank 3": ((4, 5, 8), (2, 6, 8), (2, 6, 8), None, True),
    "shared heads, rank 5": ((2, 1, 4, 5, 8), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8), None, True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    *shapes, mask_shape, gqa = SHAPES[name]
    given = tensors(*shapes, requires_grad=True)
    what = {} if mask_shape is None else {"attn_mask": torch.rand(mask_shape) < 0.7}
    mine, theirs = (f(*given, enable_gqa=gqa, **what) for f in (ours, F.scaled_dot_product_attention))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    weights = torch.rand_like(theirs)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), given) for out in (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shapes, what", [
    (((2, 4, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)), {}),
    (((2, 4, 5, 8), (3, 4, 6, 8), (3, 4, 6, 8)), {}),
    (((2, 4, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)), dict(enable_gqa=True)),
    (((2, 4, 5, 8), (2, 2, 6, 8), (2, 3, 6, 8)), dict(enable_gqa=True)),
    (((2, 4, 5, 8), (2, 4, 6, 4), (2, 4, 6, 8)), {}),
    (((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)), dict(attn_mask=torch.ones(6, dtype=torch.bool))),
    (((8,), (6, 8), (6, 8)), {}),
    (((5, 8), (6, 8), (8,)), {}),
    (((3, 5, 8), (3, 6, 8), (3, 6, 8)), dict(attn_mask=torch.ones(1, 3, 5, 6, dtype=torch.bool))),
    (((3, 5, 8), (3, 6, 8), (3, 6, 8)), dict(attn_mask=torch.ones(2, 5, 6, dtype=torch.bool))),
    (((3, 5, 8), (3, 6, 8), (3, 6, 8)), dict(attn_mask=torch.ones(5, 6, dtype=torch.int64))),
    (((3, 5, 8), (3, 6, 8), (3, 6, 8)), dict(attn_mask=[[True]])),
])  # fmt: skip
def test_what_pytorch_refuses_is_refused(shapes, what):
    given = tensors(*shapes)
    assert refused(F.scaled_dot_product_attention, *given, **what)
    with pytest.raises((ValueError, TypeError), match="^ssmax_torch"):
        ours(*given, **what)


@pytest.mark.parametrize("is_causal", [False, True])
def test_other_positions_of_values(is_causal):
    """Raises an error, also for arguments that PyTorch accepts."""
    with pytest.raises(ValueError, match="value has 7 positions, key has 6"):
        ours(*tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 7, 8)), is_causal=is_causal)


def test_strides():
    """Tensors with any strides have the results and gradients of contiguous copies."""
    q, k, v = (x.mT for x in tensors((2, 4, 8, 5), (2, 4, 8, 6), (2, 4, 8, 6)))
    bias = torch.randn(6, 5, 4).permute(2, 1, 0)
    masks = [bias, bias > 0, torch.randn(5, 1).expand(5, 6), torch.randn(2, 12, 5).mT[:, None, :, ::2]]
    for attn_mask in masks:
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask)
        torch.testing.assert_close(ours(q, k, v, attn_mask), expected, atol=1e-5, rtol=1e-5)
    given = [x.contiguous() for x in (q, k, v)]
    gradients = []
    for copied in (False, True):
        learnt = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
        used = learnt.permute(2, 1, 0)
        out = attention(*given, score=ssmax_torch.score.Bias(used.contiguous() if copied else used))
        gradients += torch.autograd.grad(out.square().sum(), learnt)
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("queries, keys", [(5, 5), (4, 6), (6, 4)])
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_bias(queries, keys, variant):
    from torch.nn.attention import bias

    given = tensors((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8))
    causal = getattr(bias, variant)(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if variant == "causal_lower_right" else 0)
    expected = F.scaled_dot_product_attention(*given, seen)
    torch.testing.assert_close(ours(*given, causal), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention(*given, mask=causal), expected, atol=1e-5, rtol=1e-5)


def test_causal_bias_of_other_extents():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    given = tensors((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    for causal in (causal_lower_right(4, 5), causal_upper_left(5, 6)):
        with pytest.raises(ValueError, match=r"attn_mask .* \[4, 6\]"):
            ours(*given, causal)
        with pytest.raises(ValueError, match="mask"):
            attention(*given, mask=causal)
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        ours(*given, causal_lower_right(4, 6), is_causal=True)


@pytest.mark.parametrize("call", [
    lambda q, x: ours(q, q, q, scale=x),
    lambda q, x: attention(q, q, q, scale=x),
    lambda q, x: attention(q, q, q, scaling=scaling.Constant(x)),
    lambda q, x: attention(q, q, q, score=ssmax_torch.score.Softcap(x)),
])  # fmt: skip
def test_a_tensor_for_a_number(call):
    """scale may be a tensor. Exception: a tensor with a derivative raises an error."""
    (q,) = tensors((1, 2, 5, 8))
    assert torch.equal(call(q, torch.tensor(0.5)), call(q, 0.5))
    with pytest.raises(ValueError, match="is a tensor with a derivative, must be a number"):
        call(q, torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_type", TYPES)
def test_lowest_number_of_a_mask(dtype, mask_type):
    """The lowest number masks a key as -inf does: the key is not in n. If all keys of a query have it, out is 0."""
    q, k, v = (x.to(dtype) for x in tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)))
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[0, 3], hidden[1, :2], hidden[2] = True, True, True
    lowest = torch.randn(4, 4).to(mask_type).masked_fill(hidden, torch.finfo(mask_type).min)
    infinite = lowest.masked_fill(hidden, -torch.inf)
    for joined in (lambda m: mask.MatrixMask(m), lambda m: mask.MatrixMask(m) & torch.zeros(4, 4, dtype=dtype)):
        for score in (None, ssmax_torch.score.Bias(torch.ones(4, 4))):
            results = [
                attention(q, k, v, mask=joined(m), score=score, scaling=scaling.LogN(), return_lse=True)
                for m in (lowest, infinite)
            ]
            for mine, other in zip(*results, strict=True):
                assert torch.equal(mine, other)
            assert (results[0][0][:, :, 2] == 0).all()
