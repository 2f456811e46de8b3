"""Softmax and its relatives over rows, compared to plain PyTorch in float64."""

import pytest
import torch
from torch.library import opcheck

import ssmax_torch
from ssmax_torch import _rows

TYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def sparsemax(z):
    ordered = z.sort(-1, descending=True).values
    sums, n = ordered.cumsum(-1) - 1, torch.arange(1, z.shape[-1] + 1)
    last = (n * ordered > sums).sum(-1, keepdim=True)
    return (z - sums.gather(-1, last - 1) / last).relu()


def entmax15(z):
    z = z / 2
    ordered, n = z.sort(-1, descending=True).values, torch.arange(1, z.shape[-1] + 1)
    mean = ordered.cumsum(-1) / n
    spread = (ordered.square().cumsum(-1) / n - mean.square()) * n
    with torch.no_grad():
        root = ((1 - spread) / n).clamp(min=0).sqrt()
        last = (mean - root <= ordered).sum(-1, keepdim=True)
    tau = mean.gather(-1, last - 1) - ((1 - spread.gather(-1, last - 1)) / last).sqrt()
    return (z - tau).relu().square()


EXPECTED = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "sparsemax": sparsemax,
    "entmax15": entmax15,
}


def random(*shape, seed=0):
    return 2 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(name, logits, dim, dtype=torch.float64, begins=None):
    """Compares result and gradient to those of EXPECTED, row by row if ragged. Returns the result."""
    tolerance = TYPES[dtype]
    given = logits.detach().to(dtype).requires_grad_()
    out = getattr(ssmax_torch, name)(given, dim, begins=begins)
    rounded = given.detach().double().requires_grad_()
    rows = rounded.movedim(dim, -1)
    ends = [0, rows.shape[-1]] if begins is None else [int(x) for x in begins]
    parts = [EXPECTED[name](rows[..., a:b]) for a, b in zip(ends, ends[1:]) if a < b]
    expected = (torch.cat(parts, -1) if parts else rows).movedim(-1, dim)
    assert out.dtype == dtype and out.shape == given.shape
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    weights = random(*logits.shape, seed=9).to(dtype)
    mine = torch.autograd.grad((out * weights).sum(), given)[0]
    theirs = torch.autograd.grad((expected * weights.double()).sum(), rounded)[0]
    torch.testing.assert_close(mine.double(), theirs, atol=20 * tolerance, rtol=20 * tolerance)
    return out


TENSORS = {  # the tensor and the dimension of its rows
    "one row": (lambda: random(7), 0),
    "last": (lambda: random(3, 5, 17), -1),
    "edges and heads": (lambda: random(50, 4), 0),
    "channels first": (lambda: random(2, 9, 4, 3, 5), 1),
    "channels last": (lambda: random(2, 9, 6, 5).to(memory_format=torch.channels_last), 1),
    "six dimensions": (lambda: random(2, 3, 2, 3, 2, 5).transpose(0, 3), 2),
    "every second": (lambda: random(6, 10, 8)[:, ::2, 1::3], 1),
    "no rows": (lambda: random(0, 4), 1),
    "no elements": (lambda: random(4, 0), 1),
}


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("name", EXPECTED)
def test_rows(name, case):
    make, dim = TENSORS[case]
    logits = make()
    if logits.numel() == 0:
        assert getattr(ssmax_torch, name)(logits, dim).shape == logits.shape
        return
    for dtype in TYPES:
        out = check(name, logits, dim, dtype)
        assert out.stride() == torch.empty_like(logits.to(dtype)).stride() or logits.dim() > 4


BEGINS = [0, 3, 3, 4, 20, 20, 29, 30]


@pytest.mark.parametrize("shape, dim", [((30,), 0), ((30, 4), 0), ((4, 30), -1), ((2, 30, 3), 1), ((3, 2, 30, 2, 2), 2)])
@pytest.mark.parametrize("name", EXPECTED)
def test_ragged_rows(name, shape, dim):
    for dtype in TYPES:
        check(name, random(*shape), dim, dtype, BEGINS)
    check(name, random(*shape), dim, begins=torch.tensor(BEGINS, dtype=torch.int32))
    check(name, random(*shape), dim, begins=range(31))


def test_no_ragged_rows():
    for begins, elements in (([0], 0), ([0, 0, 0], 0)):
        assert ssmax_torch.softmax(torch.rand(elements, 3), 0, begins=begins).shape == (elements, 3)


COPIED = [  # the tensor, the dimension of its rows, begins, and whether the call copies the logits
    (lambda: random(2, 9, 4, 3, 5), 1, None, False),
    (lambda: random(2, 3, 2, 3, 2, 5).transpose(0, 4), 2, None, True),
    (lambda: random(30, 4), 0, BEGINS, False),
    (lambda: random(2, 30, 3), 1, BEGINS, True),
]


@pytest.mark.parametrize("make, dim, begins, copied", COPIED)
def test_copies(make, dim, begins, copied, monkeypatch):
    logits, seen = make(), []
    operator = _rows._OPERATORS["softmax"]
    monkeypatch.setitem(_rows._OPERATORS, "softmax", lambda x, *rest: seen.append(x.data_ptr()) or operator(x, *rest))
    ssmax_torch.softmax(logits, dim, begins=begins)
    assert (seen != [logits.data_ptr()]) == copied


@pytest.mark.parametrize("name", EXPECTED)
def test_special_values(name):
    function = getattr(ssmax_torch, name)
    zero = -torch.inf if name == "log_softmax" else 0
    z = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf] * 3, [torch.nan, 1, 2], [torch.inf, 1, 2]])
    out = function(z)
    torch.testing.assert_close(out[0, [0, 2]], EXPECTED[name](z[0, [0, 2]]))
    assert out[0, 1] == zero and (out[1] == zero).all() and out[2:].isnan().all()
    assert torch.equal(function(z.flatten(), begins=[0, 3, 6, 9, 12])[:6], out.flatten()[:6])
    gradient = torch.autograd.functional.jacobian(lambda x: function(x)[:, 0].sum(), z[:1])
    assert gradient[0, 1] == 0


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("begins", [None, torch.tensor([0, 2, 2, 6])])
def test_derivatives_and_transforms(name, begins):
    logits = random(3, 6)

    def call(x, begins=begins):
        return getattr(ssmax_torch, name)(x, 1, begins=begins)

    def loss(x):
        return (call(x) * torch.arange(6)).square().sum()

    assert torch.autograd.gradcheck(call, logits.clone().requires_grad_())
    operator = getattr(torch.ops.ssmax, name).default
    of_rank = _rows._of_rank(logits, 4 if begins is None else 2)
    opcheck(operator, (of_rank.clone().requires_grad_(), begins))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits), call(logits))
    gradient = torch.func.grad(loss)(logits)
    leaf = logits.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(leaf), leaf)[0])
    stacked = torch.stack([logits, -logits, 2 * logits], -1)
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=-1)(stacked)
    for i, one in enumerate(mapped):
        torch.testing.assert_close(one, torch.func.grad(loss)(stacked[..., i]))
    if begins is not None:
        both = torch.stack([begins, torch.tensor([0, 1, 5, 6])])
        for out, each in zip(torch.func.vmap(call, in_dims=(None, 0))(logits, both), both, strict=True):
            torch.testing.assert_close(out, call(logits, each))
    first = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=f"ssmax_torch.{name}: the second derivative"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=f"ssmax_torch.{name}: forward-mode"):
        torch.func.jvp(call, (logits,), (logits,))


def test_threads():
    """Results are bit-identical for any number of threads."""
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        logits = random(3000, 30, seed=1).float().requires_grad_()
        out = ssmax_torch.softmax(logits, 0, begins=[0, 10, 1500, 3000])
        results.append((out, torch.autograd.grad(out.square().sum(), logits)[0], ssmax_torch.entmax15(logits, 0)))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


Z = torch.rand(4, 6)
WRONG = {
    "softmax: logits is a list, must be a tensor": lambda: ssmax_torch.softmax([1.0]),
    "log_softmax: logits has dtype torch.int64, must be float32, float64, float16 or bfloat16":
        lambda: ssmax_torch.log_softmax(torch.ones(3, dtype=torch.int64)),
    "softmax: logits is torch.sparse_coo, must be a dense tensor": lambda: ssmax_torch.softmax(Z.to_sparse()),
    "sparsemax: dim is 2, logits has shape [4, 6]": lambda: ssmax_torch.sparsemax(Z, 2),
    "softmax: dim is -1, logits has shape []": lambda: ssmax_torch.softmax(torch.tensor(1.0)),
    "entmax15: begins has shape [0], must be [rows + 1]": lambda: ssmax_torch.entmax15(Z, begins=torch.zeros(0).long()),
    "softmax: begins has dtype torch.float32, must be of integers": lambda: ssmax_torch.softmax(Z, begins=torch.ones(2)),
    "sparsemax: begins falls from 4 to 2 in row 1": lambda: ssmax_torch.sparsemax(Z, begins=[0, 4, 2, 6]),
    "softmax: begins ends with 5, elements are 6": lambda: ssmax_torch.softmax(Z, begins=[0, 5]),
    "softmax: begins begins with 1, must begin with 0": lambda: ssmax_torch.softmax(Z, begins=[1, 6]),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    with pytest.raises((ValueError, TypeError)) as error:
        WRONG[message]()
    assert str(error.value).splitlines()[0] == f"ssmax_torch.{message}"


def test_operators_called_by_hand():
    z = torch.rand(1, 1, 4, 6)
    for name in EXPECTED:
        forward, backward = (getattr(torch.ops.ssmax, name + suffix) for suffix in ("", "_backward"))
        for given in [(z[0], None), (z, torch.tensor([0, 6])), (z[0, 0], torch.tensor([0.0, 6.0])), (z.long(), None)]:
            with pytest.raises((ValueError, RuntimeError)):
                forward(*given)
        for given in [(z[..., :5], z, None), (z.double(), z, None), (z[0], z, None), (z, z, torch.tensor([0, 6]))]:
            with pytest.raises((ValueError, RuntimeError)):
                backward(*given)
