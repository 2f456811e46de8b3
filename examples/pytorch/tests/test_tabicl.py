"""Compares TabICL 2, with random weights, by this library and by its own code."""

from copy import deepcopy

import pytest
import torch
from torch import nn

pytest.importorskip("tabicl", reason="needs tabicl: pip install 'examples/pytorch[clients]'")
from tabicl._model.inference_config import InferenceConfig  # noqa: E402
from tabicl._model.kv_cache import KVCacheEntry  # noqa: E402
from tabicl._model.layers import MultiheadAttention  # noqa: E402
from tabicl._model.rope import RotaryEmbedding  # noqa: E402
from tabicl._model.tabicl import TabICL  # noqa: E402

import ssmax_torch.tabicl as adapter  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["none", "ssmax", "ssmax-mlp", "ssmax-mlp-elementwise", "qassmax-mlp", "qassmax-mlp-elementwise"]
BOUND = 1e-5  # of the largest value, which the layer norms keep near 1; both round in float32


def randomize(module):
    """Makes all weights nonzero and large enough that attention is not uniform. TabICL starts with many zeros."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


def table(rows=90, columns=6):
    generator = torch.Generator().manual_seed(2)
    train = rows * 4 // 5
    return torch.randn(1, rows, columns, generator=generator), torch.randint(
        0, 4, (1, train), generator=generator
    ).float()


def small_model(kind, **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "col_num_blocks": 2, "col_num_inds": 8, "row_num_blocks": 2, "icl_num_blocks": 2}
    heads = {"col_nhead": 4, "row_nhead": 4, "icl_nhead": 4}
    return randomize(TabICL(**sizes, **heads, col_ssmax=kind, icl_ssmax=kind, **options))


def full_precision():
    """Returns the settings of TabICL's own classifier on a CPU."""
    config = InferenceConfig()
    for part in (config.COL_CONFIG, config.ROW_CONFIG, config.ICL_CONFIG):
        part.update({"device": "cpu", "use_amp": False, "verbose": False})
    return config


def assert_close(a, b, what=""):
    assert a.shape == b.shape and a.abs().max() > 0, what
    assert (a - b).abs().max() <= BOUND * max(1, a.abs().max()), what


@pytest.fixture
def calls(monkeypatch):
    """Collects the shapes of the queries in all calls of the library's attention."""
    seen, attention = [], adapter.attention

    def counted(query, *arguments, **options):
        seen.append(tuple(query.shape))
        return attention(query, *arguments, **options)

    monkeypatch.setattr(adapter, "attention", counted)
    return seen


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_columns_rows_and_context_are_its_own(kind, interleaved, calls):
    """Copies the rows, because the predictor adds to its input."""
    own = small_model(kind, row_rope_interleaved=interleaved)
    ours = adapter.patch(deepcopy(own))
    x, y = table()
    columns = own.col_embedder(x, y_train=y, mgr_config=full_precision().COL_CONFIG)
    assert_close(columns, ours.col_embedder(x, y_train=y, mgr_config=full_precision().COL_CONFIG), "columns")
    rows = own.row_interactor(columns, mgr_config=full_precision().ROW_CONFIG)
    assert_close(rows, ours.row_interactor(columns, mgr_config=full_precision().ROW_CONFIG), "rows")
    context = own.icl_predictor(rows.clone(), y, mgr_config=full_precision().ICL_CONFIG)
    assert_close(context, ours.icl_predictor(rows.clone(), y, mgr_config=full_precision().ICL_CONFIG), "context")
    assert len(calls) == 2 * 2 + 2 + 2  # a block of columns has two calls


@torch.no_grad()
def test_a_whole_prediction_is_its_own():
    """Tests the model of TabICL's default size on 1,200 rows of 24 columns."""
    torch.manual_seed(0)
    own = randomize(TabICL(row_rope_interleaved=False))
    ours = adapter.patch(deepcopy(own))
    x, y = table(1200, 24)
    expected, actual = (model(x, y, return_logits=False, inference_config=full_precision()) for model in (own, ours))
    assert expected.std() > 1e-2
    assert (expected - actual).abs().max() <= 1e-5
    assert torch.equal(expected.argmax(-1), actual.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_its_own(kind):
    own = small_model(kind).train()
    ours = adapter.patch(deepcopy(own))
    assert list(own.state_dict()) == list(ours.state_dict())
    x, y = table()
    for model in (own, ours):
        model(x, y).square().mean().backward()
    for (name, a), b in zip(own.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert (a.grad - b.grad).abs().max() <= 1e-4 * a.grad.abs().max(), name


@torch.no_grad()
def test_a_cache_is_its_own():
    own = small_model("qassmax-mlp-elementwise")
    ours = adapter.patch(deepcopy(own))
    x, y = table()
    train = y.shape[1]
    results = []
    for model in (own, ours):
        options = {"inference_config": full_precision()}
        model.forward_with_cache(X_train=x[:, :train], y_train=y, store_cache=True, **options)
        results.append(model.forward_with_cache(X_test=x[:, train:], use_cache=True, store_cache=False, **options))
    assert_close(*results)
    assert_close(own(x, y, **options), results[1])


@pytest.mark.parametrize("kind", ["none", "ssmax", "qassmax-mlp-elementwise"])
@torch.no_grad()
def test_masks_are_its_own(kind):
    torch.manual_seed(0)
    own = randomize(MultiheadAttention(32, 4, ssmax=kind))
    ours = adapter.patch(nn.ModuleList([deepcopy(own)]))[0]
    x, other = torch.randn(3, 5, 11, 32), torch.randn(3, 5, 7, 32)
    padding = torch.arange(11).expand(3, 5, 11) > torch.arange(3, 8)[:, None]
    causal = torch.ones(11, 11).triu(1).bool()
    for rope in (None, RotaryEmbedding(8, theta=100)):
        for masks in (
            {"key_padding_mask": padding},
            {"attn_mask": causal},
            {"key_padding_mask": padding, "attn_mask": causal},
        ):
            assert_close(own(x, x, x, rope=rope, **masks), ours(x, x, x, rope=rope, **masks), list(masks))
        assert_close(own(other, x, x, rope=rope), ours(other, x, x, rope=rope), "fewer queries")
        assert_close(own(x, other, x[:, :, :7], rope=rope), ours(x, other, x[:, :, :7], rope=rope), "three inputs")
        expected, actual = (model(x, other, other, rope=rope, need_kv=True) for model in (own, ours))
        for a, b in zip(expected, actual, strict=True):
            assert_close(a, b, "kept")
        cached = KVCacheEntry(key=expected[1], value=expected[2])
        assert_close(own(x, cached_kv=cached, rope=rope), ours(x, cached_kv=cached, rope=rope), "from a cache")


@torch.no_grad()
def test_automatic_mixed_precision():
    """Under autocast, results agree up to bfloat16's rounding."""
    own = small_model("qassmax-mlp-elementwise")
    ours = adapter.patch(deepcopy(own))
    x, y = table()
    expected, actual = own(x, y), ours(x, y)
    assert actual.dtype == expected.dtype
    assert (expected.float() - actual.float()).abs().max() <= 0.05 * expected.abs().max()


def test_what_is_not_possible_is_an_error():
    with pytest.raises(ValueError, match="no attention of TabICL"):
        adapter.patch(nn.Linear(2, 2))
    model = adapter.patch(small_model("none"))
    assert adapter.patch(model) is model  # a second patch has no effect
