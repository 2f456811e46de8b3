"""MultiheadAttention equals torch.nn.MultiheadAttention, and takes a scaling."""

import copy
import math

import pytest
import torch
from torch import nn

import ssmax_torch
from ssmax_torch import MultiheadAttention, scaling

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 3
DOUBLE = torch.float64


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=DOUBLE, generator=generator)


LENGTHS = torch.tensor([7, 4, 1])[:, None]
PADDING = torch.arange(KEYS) >= LENGTHS  # true masks
MATRIX = random(QUERIES, KEYS, seed=9) > 0.5
MATRIX[:, 0] = False
OF_HEADS = random(BATCH * HEADS, QUERIES, KEYS, seed=8) > 0.5
OF_HEADS[..., 0] = False
NUMBERS = random(QUERIES, KEYS, seed=7)
CAUSAL = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)

# Arguments of the constructor and of the call.
CASES = {
    "plain": ({}, {}),
    "no bias": (dict(bias=False), {}),
    "padding": ({}, dict(key_padding_mask=PADDING)),
    "padding of numbers": ({}, dict(key_padding_mask=torch.where(PADDING, -torch.inf, random(BATCH, KEYS)))),
    "mask": ({}, dict(attn_mask=MATRIX)),
    "mask of heads": ({}, dict(attn_mask=OF_HEADS)),
    "mask of numbers": ({}, dict(attn_mask=NUMBERS)),
    "two masks": ({}, dict(attn_mask=MATRIX, key_padding_mask=PADDING)),
    "masks of two kinds": ({}, dict(attn_mask=NUMBERS, key_padding_mask=PADDING)),
    "bias_kv": (dict(add_bias_kv=True), dict(attn_mask=MATRIX, key_padding_mask=PADDING)),
    "zero": (dict(add_zero_attn=True), dict(attn_mask=OF_HEADS)),
    "both": (dict(add_zero_attn=True, add_bias_kv=True), dict(attn_mask=NUMBERS)),
    "widths": (dict(kdim=4, vdim=6), dict(key_padding_mask=PADDING)),
    "value width": (dict(vdim=6, bias=False), {}),
}  # fmt: skip


def pair(what, **more):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **what, dtype=DOUBLE)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = MultiheadAttention(WIDTH, HEADS, **what, dtype=DOUBLE, **more)
    ours.load_state_dict(theirs.state_dict(), strict=not isinstance(more.get("scaling"), nn.Module))
    return ours, theirs


def check(ours, theirs, inputs, call, **only_theirs):
    """Compares outputs and the gradients of inputs and parameters."""
    results = []
    for module, more in ((ours, {}), (theirs, dict(need_weights=False, **only_theirs))):
        given = [x.clone().requires_grad_() for x in inputs]
        q, k, v = given if len(given) == 3 else (given * 3)[:3]
        out, weights = module(q, k, v, **call, **more)
        assert weights is None
        out.square().sum().backward()
        results.append([out, *(x.grad for x in given), *(x.grad for x in module.parameters())])
        module.zero_grad()
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-10, rtol=1e-10)
    assert results[0][0].shape == results[1][0].shape


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_pytorchs(name, batch_first):
    what, call = CASES[name]
    ours, theirs = pair(dict(what, batch_first=batch_first))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    widths = (WIDTH, what.get("kdim", WIDTH), what.get("vdim", WIDTH))
    inputs = [random(BATCH, n, width, seed=i) for i, (n, width) in enumerate(zip((QUERIES, KEYS, KEYS), widths))]
    check(ours, theirs, [x if batch_first else x.transpose(0, 1) for x in inputs], call)
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        given = [x if batch_first else x.transpose(0, 1) for x in inputs]
        torch.testing.assert_close(ours(*given, **call)[0], theirs(*given, **call)[0])


@pytest.mark.parametrize("call", [{}, dict(attn_mask=CAUSAL, is_causal=True), dict(key_padding_mask=PADDING)])
def test_self_attention(call):
    ours, theirs = pair(dict(batch_first=True))
    check(ours, theirs, [random(BATCH, KEYS, WIDTH)], call)


@pytest.mark.parametrize("call", [
    {}, dict(key_padding_mask=PADDING[1]), dict(attn_mask=MATRIX), dict(attn_mask=OF_HEADS[:HEADS]),
])  # fmt: skip
def test_unbatched(call):
    ours, theirs = pair({})
    check(ours, theirs, [random(QUERIES, WIDTH), random(KEYS, WIDTH, seed=1), random(KEYS, WIDTH, seed=2)], call)


@pytest.mark.parametrize("queries", [QUERIES, KEYS, KEYS + 2])
@pytest.mark.parametrize("what", [{}, dict(add_bias_kv=True)])
def test_is_causal_without_a_mask(queries, what):
    """is_causal alone means the triangle that PyTorch requires as attn_mask."""
    ours, theirs = pair(what)
    inputs = [random(n, BATCH, WIDTH, seed=i) for i, n in enumerate((queries, KEYS, KEYS))]
    triangle = torch.ones(queries, KEYS, dtype=torch.bool).triu(1)
    theirs.forward = lambda *x, is_causal, f=theirs.forward, **more: f(*x, attn_mask=triangle, **more)
    check(ours, theirs, inputs, dict(is_causal=True))


def test_a_mask_of_numbers_has_a_gradient():
    gradients = []
    for module in pair({}):
        numbers = NUMBERS.clone().requires_grad_()
        inputs = [random(n, BATCH, WIDTH, seed=i) for i, n in enumerate((QUERIES, KEYS, KEYS))]
        module(*inputs, attn_mask=numbers)[0].square().sum().backward()
        gradients.append(numbers.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("given", [scaling.SSMax(0.7, 0.1), ssmax_torch.SSMax(HEADS, bias=True, start=0.7)])
def test_scaling(given):
    """SSMax multiplies a query's logits by s ln n + b, where n is its number of visible keys."""
    ours, theirs = pair(dict(batch_first=True), scaling=given)
    x = random(BATCH, KEYS, WIDTH)
    b = 0.1 if isinstance(given, scaling.SSMax) else 0.0
    n = torch.arange(1, KEYS + 1).minimum(LENGTHS).double()[:, None, :, None]
    projected = nn.functional.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).unflatten(-1, (3, HEADS, -1))
    q, k, v = projected.permute(2, 0, 3, 1, 4)
    z = (0.7 * n.log() + b) * (q @ k.mT) / math.sqrt(WIDTH / HEADS)
    z = z.masked_fill(CAUSAL | PADDING[:, None, None], -torch.inf)
    expected = theirs.out_proj((z.softmax(-1) @ v).transpose(1, 2).flatten(2))
    out, _ = ours(x, x, x, key_padding_mask=PADDING, attn_mask=CAUSAL, is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    out.sum().backward()
    assert ours.in_proj_weight.grad is not None
    if isinstance(given, nn.Module):
        assert {"scaling.s", "scaling.b"} <= ours.state_dict().keys() and ours.scaling.s.grad.abs().sum() > 0


def test_in_an_encoder_layer():
    """nn.TransformerEncoderLayer calls the module, also in evaluation. The layer has a kernel for even head counts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0, batch_first=True, dtype=DOUBLE)
    mine = copy.deepcopy(layer)
    mine.self_attn = MultiheadAttention(WIDTH, 4, batch_first=True, dtype=DOUBLE, scaling=scaling.SSMax(0.9))
    mine.self_attn.load_state_dict(layer.self_attn.state_dict())
    x = random(BATCH, KEYS, WIDTH)
    trained = mine(x)
    mine.eval()
    with torch.no_grad():
        torch.testing.assert_close(mine(x), trained)
        mine.self_attn.scaling = None
        torch.testing.assert_close(mine(x), layer.eval()(x))


Q = torch.rand(5, 2, WIDTH)


@pytest.mark.parametrize("message, call", [
    ("need_weights is True, must be False", lambda m: m(Q, Q, Q, need_weights=True)),
    ("scaling is a float", lambda m: MultiheadAttention(WIDTH, HEADS, scaling=0.43)),
    (r"attn_mask has shape \[5, 4\], must be \[5, 5\] or \[6, ", lambda m: m(Q, Q, Q, attn_mask=torch.zeros(5, 4))),
    (r"padding_mask has shape \[5, 2\], must be \[2, 5\]", lambda m: m(Q, Q, Q, key_padding_mask=torch.zeros(5, 2))),
    ("attn_mask has dtype torch.int32", lambda m: m(Q, Q, Q, attn_mask=torch.zeros(5, 5, dtype=torch.int32))),
    ("key has 2 dimensions", lambda m: m(Q, Q[0], Q)),
])  # fmt: skip
def test_errors(message, call):
    with pytest.raises((ValueError, TypeError), match=message):
        call(MultiheadAttention(WIDTH, HEADS))


def test_dropout_in_evaluation():
    module = MultiheadAttention(WIDTH, HEADS, 0.1).eval()
    assert module(Q, Q, Q)[0].shape == Q.shape
    module._reset_parameters()
    assert copy.deepcopy(module).in_proj_weight.shape == (3 * WIDTH, WIDTH)
