"""Compares models of `structured-data-models`, with random weights, by this library and by their own attention."""

import copy

import pytest
import torch

pytest.importorskip("sdm", reason="needs structured-data-models: pip install 'examples/pytorch[clients]'")
from sdm import TableTensor  # noqa: E402
from sdm.models import TabICLv2  # noqa: E402
from sdm.nn import SDPA, Attention, QASSMax  # noqa: E402

import ssmax_torch.sdm as adapter  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def pair(module):
    """Returns the module with random parameters, and its copy with our attention."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module, adapter.patch(copy.deepcopy(module))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mask", [None, "lengths", "matrix"])
def test_a_layer_is_sdms_own(kv_heads, scaled, mask):
    scaling = QASSMax(channels=8, num_heads=4) if scaled else None
    own, ours = pair(Attention(32, 4, kv_heads, query_scaling=scaling))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 7, 32, generator=generator)
    shared = torch.randn(3, 9, 32, generator=generator)  # keys of every first index
    options = {}
    if mask == "lengths":
        options["seqused_key_value"] = torch.tensor([9, 4, 1], dtype=torch.int32)
    elif mask == "matrix":
        options["attn_mask"] = torch.rand(3, 7, 9, generator=generator) < 0.5
        options["attn_mask"][..., 0] = True
    results = []
    for layer in (own, ours):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, shared)]
        out = layer(*inputs, **options)
        out.square().sum().backward()
        results.append([out, *(tensor.grad for tensor in inputs), *(p.grad for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert a.abs().max() > 0
        assert (a - b).abs().max() <= 1e-5 * max(1.0, float(a.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("target", ["categorical", "numerical"])
def test_a_models_output_is_its_own(target, monkeypatch):
    values = ["a", "b", "c"] * 6 if target == "categorical" else [float(i % 5) for i in range(18)]
    generator = torch.Generator().manual_seed(3)
    columns = {f"x{i}": torch.randn(24, generator=generator).tolist() for i in range(4)} | {"y": values + 6 * [None]}
    stypes = dict.fromkeys(("x0", "x1", "x2", "x3"), "numerical") | {"y": target}
    table = TableTensor.from_columns(columns, stypes=stypes)
    task = "classification" if target == "categorical" else "regression"
    torch.manual_seed(0)
    own, ours = pair(TabICLv2(task=task, pretrained=False).eval())
    calls, attention = [], adapter.attention
    monkeypatch.setattr(adapter, "attention", lambda *a, **b: calls.append(1) or attention(*a, **b))
    rows = table.drop_columns("y")
    arguments = {"x_context": rows[:18], "y_context": table[:18, "y"], "x_query": rows[18:]}
    outputs = []
    for model in (own, ours):
        torch.manual_seed(4)  # the model draws random numbers
        outputs.append(model(**arguments).numerical)
    expected, actual = outputs
    assert len(calls) > 10
    assert (expected - actual).abs().max() <= 1e-4 * expected.abs().max()


def test_what_is_not_possible_is_an_error():
    with pytest.raises(ValueError, match="model is a Linear and has no attention of structured-data-models"):
        adapter.patch(torch.nn.Linear(2, 2))
    layer = adapter.patch(torch.nn.ModuleList([SDPA(2)]))[0]
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(ValueError, match="Cannot pass both"):
        layer(q, q, q, torch.ones(1, dtype=torch.int32), torch.ones(1, 3, 3, dtype=torch.bool))
    assert layer(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 8)
