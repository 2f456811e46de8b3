"""Compares cross_entropy to torch.nn.functional.cross_entropy in float64."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.library import opcheck

import ssmax_torch
from ssmax_torch import cross_entropy

CLASSES = 50
WEIGHT = torch.arange(CLASSES) % 5 / 4.0  # exact in float32; some are 0
OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "weight": dict(weight=WEIGHT),
    "ignored class": dict(ignore_index=3),
    "softcap": dict(softcap=5.0),
    "z-loss": dict(z_loss=0.01),
    "all": dict(weight=WEIGHT, ignore_index=7, label_smoothing=0.2, softcap=4.0, z_loss=0.02),
}
# Bounds of errors: cross_entropy.hpp has a factor of 1 + softcap. For 16-bit types: the gradient's rounding.
TYPES = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def inputs(dtype=torch.float64, rows=(3, 7), classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*rows, classes, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(classes, rows, generator=generator)


def inputs_with_ignored(name, dtype):
    """Returns logits, the same in float64, and targets of which the options `name` ignore two."""
    logits, target = inputs(dtype)
    target[0, 2] = target[2, 6] = OPTIONS[name].get("ignore_index", -100)
    return logits, logits.detach().double().requires_grad_(), target


def reference(logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, softcap=0.0, z_loss=0.0):
    """Returns the loss and the losses of the rows."""
    x = logits.flatten(0, -2)
    target = target.flatten()
    x = softcap * torch.tanh(x / softcap) if softcap else x
    weight = torch.ones(x.shape[1], dtype=x.dtype) if weight is None else weight.to(x.dtype)
    what = dict(weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    counted = target != ignore_index
    losses = F.cross_entropy(x, target, reduction="none", **what) + counted.to(x.dtype) * z_loss * x.logsumexp(-1) ** 2
    return losses.sum() / weight[target[counted]].sum(), losses.reshape(logits.shape[:-1])


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient(name, dtype):
    logits, exact, target = inputs_with_ignored(name, dtype)
    loss, losses = cross_entropy(logits, target, **OPTIONS[name], return_losses=True)
    assert loss.dtype == losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == () and losses.requires_grad
    expected = reference(exact, target, **OPTIONS[name])
    tolerance = TYPES[dtype] if dtype == torch.float64 else TYPES[torch.float32]
    for mine, other in zip((loss, losses), expected, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=tolerance, rtol=tolerance)
    assert torch.equal(cross_entropy(logits, target, **OPTIONS[name]), loss)
    mine = gradient(3 * loss, logits)
    assert mine.dtype == dtype
    torch.testing.assert_close(mine.double(), gradient(3 * expected[0], exact), atol=1e-7 + TYPES[dtype] / 50, rtol=TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_of_losses(name, dtype):
    logits, exact, target = inputs_with_ignored(name, dtype)
    factors = torch.linspace(-1, 2, target.numel(), dtype=torch.float64).reshape(target.shape)
    bounds = dict(atol=1e-6 + TYPES[dtype], rtol=TYPES[dtype])
    expected = gradient((factors * reference(exact, target, **OPTIONS[name])[1]).sum(), exact)
    losses = cross_entropy(logits, target, **OPTIONS[name], return_losses=True)[1]
    torch.testing.assert_close(gradient((factors * losses).sum(), logits).double(), expected, **bounds)
    loss, losses = cross_entropy(logits, target, **OPTIONS[name], return_losses=True)
    expected += gradient(3 * reference(exact, target, **OPTIONS[name])[0], exact)
    torch.testing.assert_close(gradient((factors * losses).sum() + 3 * loss, logits).double(), expected, **bounds)


def test_plain_call_is_pytorchs():
    logits, target = inputs(torch.float32)
    weight = torch.rand(CLASSES)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight, ignore_index=2, label_smoothing=0.1)
    torch.testing.assert_close(cross_entropy(logits, target, weight, ignore_index=2, label_smoothing=0.1), expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    logits, target = inputs(rows=(4,))
    target[1] = OPTIONS[name].get("ignore_index", -100)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, **OPTIONS[name], return_losses=True), (logits,))


@pytest.mark.parametrize("dtype", [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
])  # fmt: skip
def test_types_of_targets(dtype):
    logits, target = inputs()
    loss = cross_entropy(logits, target.to(dtype), ignore_index=3)
    assert torch.equal(loss, cross_entropy(logits, target, ignore_index=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_of_weights(dtype):
    logits, target = inputs(torch.float32)
    assert torch.equal(cross_entropy(logits, target, WEIGHT.to(dtype)), cross_entropy(logits, target, WEIGHT))


@pytest.mark.parametrize("what", [{}, dict(weight=WEIGHT, z_loss=0.1, label_smoothing=0.1)])
@pytest.mark.parametrize("rows", [(0,), (0, 5), (5, 0), (4,)])
def test_no_row_counts(rows, what):
    """The loss and the gradient are 0. PyTorch's loss is NaN."""
    logits, target = inputs(rows=rows)
    loss, losses = cross_entropy(logits, torch.full_like(target, -100), return_losses=True, **what)
    assert loss == 0 and losses.shape == rows and (losses == 0).all()
    dlogits = gradient(loss, logits)
    assert dlogits.shape == logits.shape and (dlogits == 0).all()


def test_one_row():
    logits, target = inputs(rows=())
    torch.testing.assert_close(cross_entropy(logits, target), F.cross_entropy(logits, target))


@pytest.mark.parametrize("view", [
    lambda x: x.transpose(0, 1),
    lambda x: x[:, 1:],
    lambda x: x[..., 10:30],
    lambda x: x[..., ::2],
    lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    lambda x: x[:1].expand(x.shape),
])  # fmt: skip
def test_logits_that_are_not_contiguous(view):
    logits, _ = inputs()
    given = view(logits)
    target = inputs(rows=given.shape[:-1], classes=given.shape[-1])[1]
    loss, expected = cross_entropy(given, target), reference(given, target)[0]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_targets_that_are_not_contiguous():
    logits, target = inputs(rows=(6, 4))
    targets = torch.stack([target, target + 99], -1)[..., 0], target.T.contiguous().T
    for given in targets:
        assert not given.is_contiguous() and torch.equal(cross_entropy(logits, given), cross_entropy(logits, target))
    one = torch.tensor(3).expand(6, 4)
    assert torch.equal(cross_entropy(logits, one), cross_entropy(logits, one.contiguous()))


def test_the_graph_keeps_no_tensor_of_the_size_of_the_logits():
    logits, target = inputs(torch.bfloat16)
    wide = torch.zeros(3, 7, 2 * CLASSES, dtype=torch.bfloat16, requires_grad=True)
    for given in (logits, wide[..., CLASSES:]):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            cross_entropy(given, target, label_smoothing=0.1)
        large = {x.data_ptr() for x in saved if x.numel() >= given.numel()}
        assert large == {given.data_ptr()}


def test_extreme_logits():
    """A target's logit of -inf has an infinite loss. Large logits neither overflow nor lose the loss."""
    logits = torch.tensor([[1e30, 0.0, -1e30], [0.0, 1.0, -torch.inf]])
    assert cross_entropy(logits, torch.tensor([1, 0])).item() == pytest.approx(5e29)
    assert cross_entropy(logits, torch.tensor([0, 2])).item() == torch.inf
    assert cross_entropy(logits * torch.nan, torch.tensor([0, 2])).isnan()


def test_threads_do_not_change_a_bit():
    logits, target = inputs(torch.float32, rows=(700,))
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            loss = cross_entropy(logits, target, z_loss=0.1)
            results.append((loss, gradient(loss, logits)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast(dtype):
    """The loss has the type of PyTorch's loss, and the gradient the type of the logits."""
    logits, target = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(logits, target)
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    assert gradient(loss, logits).dtype == dtype


# ---- PyTorch's own checks. ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_opcheck(dtype, weight):
    logits, target = inputs(dtype, rows=(7,))
    given = logits, target, weight, -100, 0.1, 0.0, 0.01
    opcheck(torch.ops.ssmax.cross_entropy.default, given)
    opcheck(torch.ops.ssmax.cross_entropy_backward.default, (torch.tensor(2.0), torch.ones(7, dtype=torch.float64), logits.detach(), *given[1:]))


def test_operators_called_by_hand():
    """No argument that the schema accepts crashes."""
    logits, target = inputs(torch.float32, rows=(7,))
    good = [logits.detach(), target, WEIGHT, -100, 0.1, 0.0, 0.01]
    losses = torch.ones(7, dtype=torch.float64)
    wrong = {
        0: [logits[0], logits[:6], logits.mT.contiguous().mT, logits.long(), logits[:, :40]],
        1: [target[:6], target[0], target.double(), target[:1].expand(7), target + 60],
        2: [WEIGHT.double(), WEIGHT[:40], WEIGHT[:0], WEIGHT[:1].expand(CLASSES), -WEIGHT],
        4: [-0.1, 1.1, torch.nan],
        5: [-1.0, torch.inf, torch.nan, 1e300],
        6: [-1.0, torch.inf, torch.nan],
    }
    for i, values in wrong.items():
        for value in values:
            given = [*good[:i], value, *good[i + 1 :]]
            with pytest.raises(ValueError, match=r"^ssmax_torch\.cross_entropy: "), torch.no_grad():
                torch.ops.ssmax.cross_entropy(*given)
            with pytest.raises(ValueError, match=r"^ssmax_torch\.cross_entropy: "), torch.no_grad():
                torch.ops.ssmax.cross_entropy_backward(torch.tensor(1.0), losses, *given)
    with pytest.raises(ValueError, match="grad_loss"):
        torch.ops.ssmax.cross_entropy_backward(torch.ones(2), losses, *good)
    for value in (losses[:6], losses.float(), losses.reshape(7, 1)):
        with pytest.raises(ValueError, match="losses"):
            torch.ops.ssmax.cross_entropy_backward(torch.tensor(1.0), value, *good)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_break(dynamic):
    def call(logits, target):
        loss, losses = cross_entropy(2 * logits, target, WEIGHT, label_smoothing=0.1, return_losses=True)
        return loss, losses.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in ((3, 7), (5, 7)):
        logits, target = inputs(rows=rows)
        results = []
        for function in (call, compiled):
            loss, total = function(logits, target)
            results.append((loss, total, gradient(loss, logits)))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("compiled", [False, True])
def test_func_grad_and_vmap(compiled):
    logits, target = inputs(rows=(4, 7))

    def loss(x, t):
        return cross_entropy(x, t, WEIGHT, z_loss=0.1)

    each = torch.func.vmap(torch.func.grad_and_value(loss))
    if compiled:
        each = torch.compile(each, fullgraph=True, backend="aot_eager")
    gradients, losses = each(logits.detach(), target)
    for x, t, mine, value in zip(logits, target, gradients, losses, strict=True):
        torch.testing.assert_close(value, loss(x, t))
        torch.testing.assert_close(mine, gradient(loss(x, t), x))
    shared = torch.func.vmap(loss, in_dims=(1, None))(logits.detach().transpose(0, 1), target[0])
    torch.testing.assert_close(shared, torch.stack([loss(x, target[0]) for x in logits]))


def test_meta_tensors_have_shapes():
    logits, target = inputs(torch.bfloat16)
    loss, losses = cross_entropy(logits.to("meta"), target.to("meta"), return_losses=True)
    assert loss.shape == () and losses.shape == target.shape and loss.dtype == losses.dtype == torch.float32


def dual_level(logits, target):
    with forward_ad.dual_level():
        return cross_entropy(forward_ad.make_dual(logits, torch.ones_like(logits)), target)


def test_other_derivatives_are_refused():
    logits, target = inputs()
    (first,) = torch.autograd.grad(cross_entropy(logits, target), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="ssmax_torch.cross_entropy: the second derivative"):
        first.square().sum().backward()
    with pytest.raises(NotImplementedError, match="ssmax_torch.cross_entropy: the second derivative"):
        torch.autograd.functional.hessian(lambda x: cross_entropy(x, target), logits)
    for call in (
        lambda: dual_level(logits, target),
        lambda: torch.func.jvp(lambda x: cross_entropy(x, target), (logits,), (logits,)),
    ):
        with pytest.raises(NotImplementedError, match="ssmax_torch.cross_entropy: forward-mode derivatives"):
            call()


# ---- Errors. ----

L, T = torch.rand(2, 6, 5), torch.randint(5, (2, 6))
WRONG = {
    "logits is a list": lambda: cross_entropy(L.tolist(), T),
    "logits is torch.sparse_coo": lambda: cross_entropy(L.to_sparse(), T),
    "logits has dtype torch.int64": lambda: cross_entropy(L.long(), T),
    "target is a int": lambda: cross_entropy(L, 3),
    "target is on meta, logits is on cpu": lambda: cross_entropy(L, T.to("meta")),
    "target has dtype torch.float32, must be an integer type": lambda: cross_entropy(L, L[..., 0]),
    "target has dtype torch.bool": lambda: cross_entropy(L, T > 2),
    "target has shape [2], logits has shape [2, 6, 5]": lambda: cross_entropy(L, T[:, 0]),
    "target has shape [], logits has shape []": lambda: cross_entropy(L[0, 0, 0], T[0, 0]),
    "target has class 5 in row 7, logits has 5 classes": lambda: cross_entropy(L, torch.where(torch.arange(12) == 7, 5, 0).view(2, 6)),
    "target has class -1 in row 0": lambda: cross_entropy(L, torch.full((2, 6), -1)),
    "weight has shape [4], must be [5]": lambda: cross_entropy(L, T, torch.rand(4)),
    "weight has dtype torch.int64": lambda: cross_entropy(L, T, torch.ones(5, dtype=torch.int64)),
    "weight is a tensor with a derivative": lambda: cross_entropy(L, T, torch.rand(5, requires_grad=True)),
    "a weight is -1, must be from 0": lambda: cross_entropy(L, T, -torch.ones(5)),
    "label_smoothing is 1.5, must be from 0 to 1": lambda: cross_entropy(L, T, label_smoothing=1.5),
    "softcap is -1, must be from": lambda: cross_entropy(L, T, softcap=-1),
    "z_loss is -1, must be from 0": lambda: cross_entropy(L, T, z_loss=-1),
    "z_loss is a tensor with a derivative": lambda: cross_entropy(L, T, z_loss=torch.ones((), requires_grad=True)),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_the_argument_is_named(message):
    with pytest.raises((ValueError, TypeError), match=rf"^ssmax_torch\.cross_entropy: {re.escape(message)}"):
        WRONG[message]()


def test_a_target_that_changes_before_the_backward():
    logits, target = inputs()
    loss = cross_entropy(logits, target)
    with torch.no_grad():
        target.fill_(99)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cuda_tensors_are_refused():
    """Uses fake tensors, which have a device but no memory. The test needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits, target = (torch.empty(shape, device="cuda") for shape in ((2, 3), (2,)))
        with pytest.raises(ValueError, match="logits is on cuda"):
            ssmax_torch.cross_entropy(logits, target.long())
