"""Compares models of `tabpfn`, with random weights, by this library and by their own attention."""

import importlib

import pytest
import torch

pytest.importorskip("tabpfn", reason="needs tabpfn: pip install 'examples/pytorch[clients]'")
from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention  # noqa: E402

import ssmax_torch.tabpfn as adapter  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls(monkeypatch):
    """Collects the shapes of the queries in all calls while the library is registered."""
    seen, attention = [], adapter.attention

    def counted(query, *others):
        seen.append(tuple(query.shape))
        return attention(query, *others)

    monkeypatch.setattr(adapter, "attention", counted)
    yield seen
    adapter.unregister()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_is_tabpfns_own(kv_heads, dtype, calls):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 9, 4, 16, generator=generator).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 13, kv_heads, 16, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    expected = scaled_dot_product_attention(q, k, v)
    adapter.register()
    actual = scaled_dot_product_attention(q, k, v)
    assert calls == [(2, 4, 9, 16)]
    bounds = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.03}
    torch.testing.assert_close(actual, expected, **bounds)
    gradients = (torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (expected, actual))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=0, atol=bounds["atol"] * float(a.abs().max()))


@pytest.mark.parametrize("name", ["tabpfn_v2_5", "tabpfn_v2_6", "tabpfn_v3"])
@torch.no_grad()
def test_a_models_output_is_its_own(name, calls):
    module = importlib.import_module(f"tabpfn.architectures.{name}")
    torch.manual_seed(0)
    config, _ = module.parse_config({"max_num_classes": 3, "num_buckets": 10, "nlayers": 2})
    model = module.get_architecture(config).eval()
    for parameter in model.parameters():  # some layers start at 0
        parameter += 0.05 * torch.randn_like(parameter)
    x, y = torch.randn(30, 1, 6), torch.randint(0, 3, (20, 1)).float()
    expected = model(x, y)
    adapter.register()
    actual = model(x, y)
    assert len(calls) >= 4
    assert (expected - actual).abs().max() <= 1e-4 * expected.abs().max()
    adapter.unregister()
    number = len(calls)
    assert torch.equal(model(x, y), expected) and len(calls) == number
