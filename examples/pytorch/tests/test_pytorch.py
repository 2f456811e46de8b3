"""PyTorch's own checks: opcheck, gradcheck, compile, export, and its own attention."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import ssmax_torch
from ssmax_torch import attention, mask, scaling, score
from ssmax_torch._arguments import arguments


def inputs(dtype=torch.float32, queries=12, keys=12, requires_grad=True, layout="heads first"):
    torch.manual_seed(0)
    shapes = [(2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)]
    if layout == "heads last":
        return [torch.rand(b, n, h, d, dtype=dtype).transpose(1, 2).requires_grad_(requires_grad) for b, h, n, d in shapes]
    return [torch.rand(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


def parameter(*shape, dtype=torch.float32):
    return torch.rand(shape, dtype=dtype, requires_grad=True)


CASES = {
    "plain": lambda: {},
    "plain": lambda: {},
    "ssmax": lambda: dict(scaling=scaling.SSMax(parameter(4), parameter(4)), mask=mask.Causal()),
    "table": lambda: dict(scaling=scaling.SizeTable(parameter(12), parameter())),
    "query": lambda: dict(scaling=scaling.PerQuery(parameter(2, 4, 12)), mask=mask.KeyLengths([3, 12])),
    "score": lambda: dict(score=score.Softcap(5) | score.Alibi(parameter(4)) | score.Bias(parameter(4, 12, 12))),
    "sinks": lambda: dict(sinks=parameter(4), mask=torch.rand(12, 12) < 0.5),
    "documents": lambda: dict(mask=mask.Documents([0, 5, 12])),
    "dropout": lambda: dict(dropout_p=0.5),
    "dropout with seeds": lambda: dict(dropout_p=0.5, dropout_seed=torch.tensor([3, 4]), dropout_offset=2**64 - 1),
    "positions": lambda: dict(rope=ssmax_torch.Rope(4, positions=torch.arange(72).view(3, 2, 12), axes=[2, 0])),
    "chunks": lambda: dict(mask=mask.Chunks(5), score=score.Alibi(parameter(4), absolute=True)),
    "top-left": lambda: dict(mask=mask.CausalTopLeft(), rope=ssmax_torch.Rope(4, first_channel=2, frequencies=[1.0, 0.1])),
    "modulo": lambda: dict(
        mask=mask.MatrixMask(torch.rand(2, 12, 12) < 0.5, modulo=True), score=score.Bias(parameter(1, 2, 12, 12), modulo=True)
    ),
    "sloped bias": lambda: dict(score=score.SlopedBias(torch.rand(12, 12), torch.rand(4))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["heads first", "heads last"])
def test_opcheck(name, layout):
    what = dict(dict.fromkeys(["scaling", "mask", "score", "sinks", "rope", "scale"]), scaled_sinks=False, **CASES[name]())
    q, k, v = inputs(layout=layout)
    opcheck(torch.ops.ssmax.attention.default, (q, k, v, *arguments(q, **what)))


def test_arguments_that_are_left_out_have_their_defaults():
    q, k, v = inputs(requires_grad=False)
    defaults = [argument.default_value for argument in torch.ops.ssmax.attention.default._schema.arguments[3:]]
    given = arguments(q, None, None, None, None, False, None, None)
    assert given == (None,)
    for a, b in zip(torch.ops.ssmax.attention(q, k, v, *given), torch.ops.ssmax.attention(q, k, v, *defaults)):
        assert torch.equal(a, b)
    given = arguments(q, scaling.SSMax(0.5), mask.Causal(), None, None, False, None, 0.3)
    assert len(given) == 7
    for a, b in zip(torch.ops.ssmax.attention(q, k, v, *given), torch.ops.ssmax.attention(q, k, v, *given, *defaults[7:])):
        assert torch.equal(a, b)


@pytest.mark.parametrize("with_lse", [False, True])
def test_attention_forward_is_bit_identical_to_attention(with_lse):
    q, k, v = inputs(requires_grad=False)
    given = arguments(q, scaling.SSMax(torch.rand(4), torch.rand(4)), mask.Causal(), None, None, False, None, 0.3)
    for common in ((), given):
        out, lse = torch.ops.ssmax.attention(q, k, v, *common)
        out_forward, lse_forward = torch.ops.ssmax.attention_forward(with_lse, q, k, v, *common)
        assert torch.equal(out_forward, out)
        assert torch.equal(lse_forward, lse) if with_lse else lse_forward is None
        opcheck(torch.ops.ssmax.attention_forward.default, (with_lse, q, k, v, *common))


@pytest.mark.parametrize("layout", ["heads first", "heads last"])
def test_compiled_call_without_a_gradient(layout):
    q, k, v = inputs(layout=layout, requires_grad=False)

    def call(q, k, v):
        return attention(q, k, v), *attention(q, k, v, return_lse=True)

    for a, b in zip(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v), strict=True):
        assert torch.equal(a, b)


def test_opcheck_of_the_others():
    q, k, v = inputs(requires_grad=False)
    operands = arguments(q, None, mask.Causal(), None, None, False, None, None)
    opcheck(torch.ops.ssmax.decode.default, (q[:, :, :1], k, v, torch.tensor([12, 5]), False, *operands))
    opcheck(torch.ops.ssmax.rotate.default, (q, ssmax_torch.Rope(8).numbers(), 3))
    opcheck(torch.ops.ssmax.rotate.default, (q, ssmax_torch.Rope(8).numbers(), 0, torch.arange(24).view(2, 1, 12)))


def test_gradcheck():
    """Checks the gradient of every argument by finite differences."""
    double = torch.float64
    shapes = [(1, 2, 3, 4), (1, 1, 4, 4), (1, 1, 4, 4), (2,), (2,), (4,), (1, 2, 3), (2,), (2, 3, 4), (2,)]
    torch.manual_seed(0)
    q, k, v, s, b, p, c, slopes, bias, sinks = (parameter(*shape, dtype=double) for shape in shapes)

    def ssmax(q, k, v, s, b, slopes, bias, sinks):
        given = score.Softcap(3) | score.Alibi(slopes) | score.Bias(bias)
        return attention(
            q, k, v, scaling=scaling.SSMax(s, b), mask=mask.Causal(), score=given, sinks=sinks,
            rope=ssmax_torch.Rope(4), return_lse=True,
        )  # fmt: skip

    def table(q, k, v, s, b, p):
        return attention(q, k, v, scaling=scaling.SizeTable(p, s, b), mask=mask.SlidingWindow(3))

    def query(q, k, v, c, bias):
        return attention(q, k, v, scaling=scaling.PerQuery(c), score=score.Bias(bias), return_lse=True)

    assert torch.autograd.gradcheck(ssmax, (q, k, v, s, b, slopes, bias, sinks))
    assert torch.autograd.gradcheck(table, (q, k, v, s, b, p))
    assert torch.autograd.gradcheck(query, (q, k, v, c, bias))


class Block(torch.nn.Module):
    """A layer of a transformer."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.project_in = torch.nn.Linear(width, 3 * width)
        self.project_out = torch.nn.Linear(width, width)
        self.attention = ssmax_torch.SSMax(heads, bias=True)

    def forward(self, x):
        q, k, v = self.project_in(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v, mask=mask.Causal(), score=score.Softcap(20.0))
        return x + self.project_out(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_break(dynamic):
    torch.manual_seed(0)
    block = Block()
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (7, 11):
        x = torch.randn(2, length, 32)
        results = []
        for model in (block, compiled):
            y = x.clone().requires_grad_()
            out = model(y)
            results.append((out, *torch.autograd.grad(out.square().sum(), [y, *model.parameters()])))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_export():
    block = Block().eval()
    x = torch.randn(2, 9, 32)
    program = torch.export.export(block, (x,), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=64)},))
    for length in (9, 17):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(program.module()(x), block(x))


def test_module_state():
    module = ssmax_torch.SSMax(4, bias=True)
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {"s": (4,), "b": (4,)}
    assert ssmax_torch.SSMax(4).b is None


@pytest.mark.parametrize("what", [
    {}, dict(is_causal=True), dict(scale=0.3), dict(attn_mask=torch.rand(12, 12) < 0.6), dict(attn_mask=torch.randn(2, 1, 12, 12)),
])  # fmt: skip
def test_scaled_dot_product_attention(what):
    torch.manual_seed(1)
    q, k, v = inputs()
    ours = ssmax_torch.scaled_dot_product_attention(q, k, v, enable_gqa=True, **what)
    theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **what)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weights = torch.rand_like(theirs)
    for mine, other in zip(*(torch.autograd.grad((x * weights).sum(), [q, k, v]) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("queries, keys", [(5, 9), (9, 5)])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_is_causal_is_aligned_top_left(queries, keys, rank):
    torch.manual_seed(2)
    q, k, v = (torch.rand((2, 3, n, 8)[4 - rank :]) for n in (queries, keys, keys))
    ours = ssmax_torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5, rtol=1e-5)
