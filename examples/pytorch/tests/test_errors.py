"""Invalid arguments raise a Python exception that names the argument, and never crash."""

import itertools
import random
import re

import pytest
import torch

from ssmax_torch import (
    KVCache,
    Rope,
    RopeScaling,
    attention,
    attention_varlen,
    mask,
    scaled_dot_product_attention,
    scaling,
    score,
)


def inputs():
    torch.manual_seed(0)
    return torch.rand(2, 4, 6, 8), torch.rand(2, 2, 6, 8), torch.rand(2, 2, 6, 8)


Q, K, V = inputs()
INF, NAN = float("inf"), float("nan")

WRONG = {
    "query": [
        lambda: attention(Q[0], K, V),
        lambda: attention(Q.long(), K, V),
        lambda: attention(Q.to(torch.complex64), K, V),
        lambda: attention(Q[:, :3], K, V),
        lambda: attention(Q.mT.contiguous().mT, K, V),
        lambda: attention(Q[..., ::2], K[..., :4], V),
        lambda: scaled_dot_product_attention(Q[0, 0, 0], K, V),
    ],
    "key": [
        lambda: attention(Q, K[:1], V),
        lambda: attention(Q, K[..., :4], V),
        lambda: attention(Q, K.double(), V),
        lambda: attention(Q, K.mT.contiguous().mT, V),
        lambda: attention(Q, K[0, 0], V),
        lambda: scaled_dot_product_attention(Q, K, V),
    ],
    "value": [
        lambda: attention(Q, K, V[:, :, :5]),
        lambda: attention(Q, K, V[:, :1]),
        lambda: attention(Q, K, V.bfloat16()),
        lambda: attention(Q, K, V.mT.contiguous().mT),
    ],
    "s": [
        lambda: attention(Q, K, V, scaling=scaling.SSMax(torch.rand(3))),
        lambda: attention(Q, K, V, scaling=scaling.SSMax(torch.rand(4, 1))),
        lambda: attention(Q, K, V, scaling=scaling.SSMax(torch.ones(4, dtype=torch.int32))),
    ],
    "b": [lambda: attention(Q, K, V, scaling=scaling.SSMax(1.0, torch.rand(5)))],
    "p": [
        lambda: attention(Q, K, V, scaling=scaling.SizeTable(torch.rand(5))),
        lambda: attention(Q, K, V, scaling=scaling.SizeTable(None)),
    ],
    "c": [
        lambda: attention(Q, K, V, scaling=scaling.PerQuery(torch.rand(2, 4, 5))),
        lambda: attention(Q, K, V, scaling=scaling.PerQuery(torch.rand(1, 2, 4, 6))),
    ],
    "trained_length": [lambda: attention(Q, K, V, scaling=scaling.QwenLogN(1))],
    "scaling": [
        lambda: attention(Q, K, V, scaling=scaling.QwenLogN(INF)),
        lambda: attention(Q, K, V, scaling="ssmax"),
        lambda: attention(Q, K, V, scaling=torch.rand(4)),
    ],
    "left": [lambda: attention(Q, K, V, mask=mask.SlidingWindow(-1)), lambda: mask.SlidingWindow(None)],
    "right": [lambda: attention(Q, K, V, mask=mask.SlidingWindow(1, -1)), lambda: mask.SlidingWindow(1, 0.5)],
    "prefix": [lambda: attention(Q, K, V, mask=mask.PrefixLM([1, 2, 3])), lambda: mask.PrefixLM([1.5]),
        lambda: attention(Q, K, V, mask=mask.PrefixLM(torch.tensor([1, -1])))],
    "padding": [
        lambda: attention(Q, K, V, mask=mask.LeftPadding([1])),
        lambda: attention(Q, K, V, mask=mask.LeftPadding(torch.ones(2, 1, dtype=torch.int64))),
        lambda: mask.LeftPadding([1.5]),
    ],
    "lengths": [
        lambda: attention(Q, K, V, mask=mask.KeyLengths([1])),
        lambda: mask.KeyLengths([-1, 99]),
        lambda: attention(Q, K, V, mask=mask.KeyLengths([6, 7])),
        lambda: attention(Q, K, V, mask=mask.KeyLengths(torch.tensor([-1, 6]))),
        lambda: attention(Q, K, V, mask=mask.KeyLengths(torch.ones(2, 1, dtype=torch.int64))),
    ],
    "cu_seqlens": [
        lambda: attention(Q, K, V, mask=mask.Documents([0, 4, 2, 6])),
        lambda: attention(Q, K, V, mask=mask.Documents([1, 6])),
        lambda: attention(Q, K, V, mask=mask.Documents([0, 5])),
        lambda: attention(Q, K, V, mask=mask.Documents(torch.zeros(0, dtype=torch.int64))),
        lambda: attention(Q, K, V, mask=mask.Documents([0, 6], cu_seqlens_keys=[0, 3, 6])),
        lambda: attention(Q, K, V, mask=mask.Documents([0, -1, 6])),
        lambda: mask.Documents([0, 6]) & mask.Documents([0, 6]),
        lambda: mask.Documents([0.5, 6]),
    ],
    "mask": [
        lambda: attention(Q, K, V, mask=torch.ones(5, 6, dtype=torch.bool)),
        lambda: attention(Q, K, V, mask=torch.ones(1, 2, 4, 6, 6, dtype=torch.bool)),
        lambda: attention(Q, K, V, mask=torch.ones(6, 6, dtype=torch.int32)),
        lambda: attention(Q, K, V, mask="causal"),
        lambda: attention(Q, K, V, mask=[[True]]),
    ],
    "floor": [lambda: attention(Q, K, V, scaling=scaling.AdjustedSize(scaling.LogN(), 0, 0))],
    "tau": [lambda: score.ScaleInvariant(0), lambda: score.ScaleInvariant(NAN)],
    "cap": [lambda: score.Softcap(0), lambda: score.Softcap(-1), lambda: score.Softcap(NAN)],
    "slopes": [
        lambda: attention(Q, K, V, score=score.Alibi(torch.rand(2))),
        lambda: attention(Q, K, V, score=score.SlopedBias(Q[0, 0, :, :6], torch.rand(2))),
        lambda: score.SlopedBias(Q, torch.rand(4, requires_grad=True)),
    ],
    "bias": [
        lambda: attention(Q, K, V, score=score.SlopedBias(torch.rand(3, 6, 6), torch.rand(4))),
        lambda: score.SlopedBias(torch.rand(6, 6, requires_grad=True), torch.rand(4)),
        lambda: attention(Q, K, V, score=score.Bias(torch.rand(3, 6, 6))),
    ],
    "score": [lambda: score.Bias(Q) | score.Softcap(1), lambda: score.Softcap(1) | score.ScaleInvariant(),
        lambda: attention(Q, K, V, score=score.ScaleInvariant(), mask=torch.zeros(6, 6)),
        lambda: attention(Q, K, V, score=score.SlopedBias(torch.rand(6, 6), torch.rand(4)), mask=torch.zeros(6, 6)),
        lambda: score.SlopedBias(Q, Q[0, 0, 0]) | score.Bias(Q), lambda: score.Alibi(Q) | score.SlopedBias(Q, Q),
        lambda: attention(Q, K, V, score=mask.Causal())],
    "sinks": [
        lambda: attention(Q, K, V, sinks=torch.rand(5)),
        lambda: attention(Q, K, V, sinks=torch.rand(4, 1)),
        lambda: attention(Q, K, V, sinks=torch.ones(4, dtype=torch.int64)),
    ],
    "width": [lambda: attention(Q, K, V, rope=Rope(7)), lambda: attention(Q, K, V, rope=Rope(0))],
    "rope": [
        lambda: attention(Q, K, V, rope=Rope(8, pairing="other")),
        lambda: attention(Q, K, V, rope=Rope(8, scaling=RopeScaling("other"))),
        lambda: attention(Q, K, V, rope=Rope(NAN)),
        lambda: attention(Q, K, V, rope=Rope(8, key_position=-1)),
        lambda: attention(Q, K, V, rope=Rope(16)),
    ],
    "theta": [lambda: attention(Q, K, V, rope=Rope(8, theta=NAN)), lambda: attention(Q, K, V, rope=Rope(8, theta=1.0))],
    "size": [lambda: attention(Q, K, V, mask=mask.Chunks(0)), lambda: mask.Chunks(1.5)],
    "chunks": [lambda: mask.Chunks(4) & mask.Chunks(8)],
    "frequencies": [
        lambda: attention(Q, K, V, rope=Rope(8, frequencies=[1.0])),
        lambda: attention(Q, K, V, rope=Rope(8, frequencies=[1.0, 1.0, 1.0, NAN])),
        lambda: attention(Q, K, V, rope=Rope(8, 20.0, frequencies=[1.0] * 4)),
    ],
    "attention_factor": [lambda: attention(Q, K, V, rope=Rope(8, attention_factor=0.0))],
    "positions": [
        lambda: attention(Q, K, V, rope=Rope(8, positions=torch.arange(6))),
        lambda: attention(Q, K, V, rope=Rope(8, positions=torch.zeros(3, 6, dtype=torch.int64))),
        lambda: attention(Q, K, V, rope=Rope(8, positions=torch.zeros(1, 5, dtype=torch.int64))),
        lambda: attention(Q, K, V, rope=Rope(8, positions=torch.zeros(2, 6))),
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[0] * 6], axes=[0] * 4)),
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[0] * 6], key_position=1)),
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[0] * 6]), mask=mask.Documents([0, 6])),
    ],
    "axes": [
        lambda: attention(Q, K, V, rope=Rope(8, axes=[0] * 4)),
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[[0] * 6]], axes=[0] * 3)),
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[[0] * 6]], axes=[0, 0, 0, 1])),
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[[0] * 6]], axes=[0, 0, -1, 0])),
    ],
    "dropout_seed": [
        lambda: attention(Q, K, V, dropout_p=0.5, dropout_seed=-1),
        lambda: attention(Q, K, V, dropout_p=0.5, dropout_seed=2**64),
        lambda: attention(Q, K, V, dropout_p=0.5, dropout_seed=torch.tensor([1, 2, 3])),
        lambda: attention(Q, K, V, dropout_p=0.5, dropout_seed=torch.rand(2)),
        lambda: attention(Q, K, V, dropout_p=0.5, dropout_seed=torch.ones(2, 1, dtype=torch.int64)),
    ],
    "dropout_offset": [lambda: attention(Q, K, V, dropout_p=0.5, dropout_offset=x) for x in (-1, 2**64)],
    "first_channel": [lambda: attention(Q, K, V, rope=Rope(8, first_channel=-1))],
    "dropout_p": [
        *(lambda p=p: scaled_dot_product_attention(Q, Q, Q, dropout_p=p) for p in (-0.1, 1.1, NAN)),
        lambda: attention(Q, K, V, dropout_p=2),
    ],
    "attn_mask": [lambda: scaled_dot_product_attention(Q, Q, Q, [[True]]), lambda: scaled_dot_product_attention(Q, Q, Q, attn_mask=torch.ones(6, 6), is_causal=True)],
}  # fmt: skip


@pytest.mark.parametrize("name, call", [(name, call) for name, calls in WRONG.items() for call in calls])
def test_the_argument_is_named(name, call):
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}") as error:
        call()
    assert not re.search(r"ssmax::|cumulative_|\b[qkv]\b", str(error.value))


def decode(queries=6, **what):
    cache = KVCache(2, 2, 8, capacity=8, **what)
    cache.append(K, V)
    return cache.decode(Q[:, :, :1].expand(-1, -1, queries, -1))


# Messages of the C++ library, with the names of the package, after "ssmax_torch.".
MESSAGES = {
    "mask.Documents: cu_seqlens falls from 4 to 2 in document 1":
        lambda: attention(Q, K, V, mask=mask.Documents([0, 4, 2, 6])),
    "mask.Documents: cu_seqlens has extent 2, cu_seqlens_keys has 3":
        lambda: attention(Q, K, V, mask=mask.Documents([0, 6], cu_seqlens_keys=[0, 3, 6])),
    "mask.Documents: cu_seqlens_keys ends with 5, keys are 6":
        lambda: attention(Q, K, V, mask=mask.Documents([0, 6], cu_seqlens_keys=[0, 5])),
    "mask.SlidingWindow: left is -1, must be at least 0": lambda: attention(Q, K, V, mask=mask.SlidingWindow(-1)),
    "mask.Chunks: size is 0, must be at least 1": lambda: attention(Q, K, V, mask=mask.Chunks(0)),
    "attention: mask has two of CausalTopLeft, LeftPadding and Documents, must have one of them":
        lambda: attention(Q, K, V, mask=mask.CausalTopLeft() & mask.Documents([0, 6])),
    "mask.LeftPadding: padding has extent 1, batch entries are 2": lambda: attention(Q, K, V, mask=mask.LeftPadding([1])),
    "KVCache.decode: mask has LeftPadding, the sequences of a cache have no padding":
        lambda: decode_with(mask.LeftPadding([0, 0])),
    "attention_varlen: mask is CausalTopLeft(), must be of Causal, SlidingWindow, Chunks and MatrixMask":
        lambda: attention_varlen(Q[0], K[0], V[0], [0, 4], mask=mask.CausalTopLeft()),
    "KVCache.decode: mask has CausalTopLeft, must be aligned bottom-right": lambda: decode_with(mask.CausalTopLeft()),
    "mask.PrefixLM: prefix has extent 3, batch entries are 2":
        lambda: attention(Q, K, V, mask=mask.PrefixLM([1, 2, 3])),
    "mask.KeyLengths: lengths has extent 1, batch entries are 2": lambda: attention(Q, K, V, mask=mask.KeyLengths([1])),
    "scaling.SizeTable: p has extent 5, the largest n is 6":
        lambda: attention(Q, K, V, scaling=scaling.SizeTable(torch.rand(5))),
    "scaling.QwenLogN: trained_length is 1, must be at least 2":
        lambda: attention(Q, K, V, scaling=scaling.QwenLogN(1)),
    "scaling.Llama4Temperature: floor_length is 0, must be at least 1":
        lambda: attention(Q, K, V, scaling=scaling.Llama4Temperature(1, 0)),
    "scaling.MinistralTemperature: trained_length is 0, must be at least 1":
        lambda: attention(Q, K, V, scaling=scaling.MinistralTemperature(1, 0)),
    "scaling.InklingTemperature: floor_length is 0, must be at least 1":
        lambda: attention(Q, K, V, scaling=scaling.InklingTemperature(1, 0)),
    "attention: floor is 0, must be at least 1":
        lambda: attention(Q, K, V, scaling=scaling.AdjustedSize(scaling.LogN(), 0, 0)),
    "score.Softcap: cap is inf, must be above 0 and finite": lambda: attention(Q, K, V, score=score.Softcap(INF)),
    "score.ScaleInvariant: tau is inf, must be above 0 and finite":
        lambda: attention(Q, K, V, score=score.ScaleInvariant(INF)),
    "Rope: width is 7, must be even and at least 2": lambda: attention(Q, K, V, rope=Rope(7)),
    "attention: key has channels 8, the rope's first_channel + width is 16": lambda: attention(Q, K, V, rope=Rope(16)),
    "attention: scaled_sinks is true, must be false without sinks":
        lambda: attention(Q, K, V, mask=mask.SlidingWindow(1), scaled_sinks=True),
    "KVCache.append: key has channels 8, the rope's first_channel + width is 16": lambda: decode(rope=Rope(16)),
    "attention: rope has positions of 5 tokens, the call has tokens up to 5":
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[0] * 5])),
    "Rope: axes has extent 3, pairs are 4":
        lambda: attention(Q, K, V, rope=Rope(8, positions=[[[0] * 6]], axes=[0] * 3)),
    "KVCache.decode: query has positions 7, a sequence of the cache has 6": lambda: decode(7),
    "KVCache.decode: mask shows key 0, key no longer stores keys [0, 2)": lambda: forgotten(),
}  # fmt: skip


def decode_with(given):
    cache = KVCache(2, 2, 8, capacity=8)
    cache.append(K, V)
    return cache.decode(Q, mask=given)


def forgotten():
    cache = KVCache(2, 2, 8, capacity=4, ring=True)
    cache.append(K, V)
    return cache.decode(Q[:, :, :5])


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_library(message):
    with pytest.raises(ValueError) as error:
        MESSAGES[message]()
    assert str(error.value).splitlines()[0] == f"ssmax_torch.{message}"


@pytest.mark.parametrize("at", range(3))
def test_devices(at):
    given = [Q, K, V]
    given[at] = given[at].to("meta")
    with pytest.raises(ValueError, match=("query", "key", "value")[1 if at == 0 else at]):
        attention(*given)
    with pytest.raises(ValueError, match="is on meta"):
        attention(Q, K, V, scaling=scaling.SSMax(torch.rand(4, device="meta")))


def test_meta_tensors_have_shapes():
    out, lse = attention(*(x.to("meta") for x in (Q, K, V)), return_lse=True)
    assert out.shape == Q.shape and lse.shape == Q.shape[:3] and out.device.type == "meta"


# Checked without data. Exception: p, because the check compares its extent to the largest n.
BY_SHAPE = ["query", "key", "value", "s", "b", "c", "prefix", "lengths", "mask", "slopes", "bias", "sinks"]


@pytest.mark.parametrize("name", BY_SHAPE)
def test_fake_tensors_are_checked_as_real_ones(name):
    """Fake tensors raise the same errors. Exception: the numbers in prefix and lengths are not checked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls = WRONG[name][:-1] if name == "prefix" else WRONG[name]
    if name == "lengths":
        calls = [calls[0], calls[1], calls[-1]]
    for call in calls:
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((ValueError, TypeError), match=rf"\b{name}"):
            call()


def test_meta_tensors_are_checked_as_real_ones():
    q, k, v = (x.to("meta") for x in (Q, K, V))
    for given in ((q, k[..., :4], v), (q, k, v[:, :, :5]), (q[:, :3], k, v), (q, k.double(), v)):
        with pytest.raises(ValueError, match="ssmax_torch.attention: "):
            attention(*given)


def test_lengths_are_named_with_the_keys():
    with pytest.raises(ValueError, match=r"lengths has 99 for batch entry 1, keys are 6"):
        attention(Q, K, V, mask=mask.KeyLengths([6, 99]))
    with pytest.raises(ValueError, match=r"lengths is \[-1, 99\]"):
        mask.KeyLengths([-1, 99])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make, kind", [
    (lambda x: x.to_sparse(), "sparse_coo"),
    (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "nested"),
    (lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged), "nested"),
    (lambda x: x.tolist(), "is a list, must be a tensor"),
])  # fmt: skip
@pytest.mark.parametrize("at", range(3))
def test_tensors_that_are_not_dense(make, kind, at):
    given = [Q, K, V]
    given[at] = make(given[at])
    for function in (attention, scaled_dot_product_attention):
        with pytest.raises((ValueError, TypeError), match=f"{('query', 'key', 'value')[at]} is .*{kind}|{kind}"):
            function(*given)


@pytest.mark.parametrize("bad", [None, 1.0, [1.0], "query", Q.numpy()])
def test_other_objects(bad):
    for given in ((bad, K, V), (Q, bad, V), (Q, K, bad)):
        with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)):
            attention(*given)


def test_numbers_that_are_no_numbers():
    """NaN and infinity raise no error. Exception: the scale must be finite."""
    for value in (NAN, INF, -INF, 0.0, -3.0, 1e38):
        attention(Q, K, V, scaling=scaling.SSMax(value, value))
        attention(Q, K, V, scaling=scaling.Constant(value))
        attention(Q, K, V, scaling=scaling.PerQuery(torch.full((4, 6), value)))
        attention(Q, K, V, sinks=torch.full((4,), value), score=score.Bias(torch.full((6, 6), value)))
    for scale in (0.0, -3.0, 1e38):
        attention(Q, K, V, scale=scale)
    for scale in (NAN, INF, -INF):
        with pytest.raises(ValueError, match="scale is -?(nan|inf), must be finite"):
            attention(Q, K, V, scale=scale)
    assert attention(Q * NAN, K, V).isnan().all()


def test_operators_called_by_hand():
    """Calls the operators directly: no argument that the schema accepts crashes."""
    defaults = {a.name: a.default_value for a in torch.ops.ssmax.attention.default._schema.arguments[3:]}
    names = list(defaults)
    good = tuple((defaults | {"scaling": 2, "numbers": [1.0, 0.0]}).values())
    torch.ops.ssmax.attention(Q, K, V, *good)
    change = {
        "scaling": [-1, 9, 2**62, 3, 8],
        "numbers": [[], [1.0]],
        "size": [[], [1], [2**63 - 1, 1], [-(2**63), 2**63 - 1], [0, 0]],
        "window": [[], [1], [1, 2, 3], [-(2**63), 2**63 - 1]],
        "left_padding": [torch.ones(2), torch.tensor([-(2**63), 2**63 - 1]), torch.tensor([1, 2])],
        "prefix": [torch.ones(2), torch.ones(1, dtype=torch.int64)],
        "lengths": [torch.full((2,), -(2**63)), torch.full((2,), 2**63 - 1)],
        "cu_queries": [torch.tensor([0, 6])],
        "cu_keys": [torch.tensor([0, 6])],
        "visible": [torch.ones(6, 6)],
        "softcap": [0.0, -1.0, NAN, INF],
        "scale_invariant": [0.0, -1.0, NAN, 1e-320],
        "bias": [torch.ones(6, 6, dtype=torch.float64)],
        "bias_hides": [True],
        "bias_modulo": [True],
        "visible_modulo": [True],
        "rope": [[], [1.0], [NAN] * 12, [1e300] * 12, [0, 8, 1e4, 5, 0, 1, 0, 1, 1, 1, 0, 1], [1e15, 8, 1e4, 0, 0, 1, 0, 1, 1, 1, 0, 1],
            [0, 8, 1e4, 0, 0, 1, 0, 1, 1, 1, 1e15, 1], [0, 8, 1e4, 0, 0, 1, 0, 1, 1, 1, 0, 1, 2.0]],
        "rope_positions": [torch.zeros(1, 1, 6, dtype=torch.int64), torch.zeros(6)],
        "rope_axes": [[], [0]],
        "dropout_seed": [torch.zeros(0, dtype=torch.int64), torch.zeros(3), torch.zeros(2, dtype=torch.int64)],
        "dropout_offset": [-1, 2**63 - 1],
        "chunk": [0, -(2**63), 2**63 - 1],
        "top_left": [True],
        "slopes_multiply": [-1, 1, 2, 2**62],
        "dropout_p": [-1.0, 0.5, 1.0, NAN],
        "scale": [NAN, INF],
    }
    for name, values in change.items():
        for value in values:
            wrong = list(good)
            wrong[names.index(name)] = value
            try:
                torch.ops.ssmax.attention(Q, K, V, *wrong)
            except (ValueError, RuntimeError, MemoryError):
                pass
    out, lse = torch.ops.ssmax.attention(Q, K, V, *good)
    for arguments in [
        (out[:1], None, Q, K, V, out, lse, [False] * 7),
        (out, lse[:, :1], Q, K, V, out, lse, [False] * 7),
        (out, None, Q, K, V, out, lse, [True]),
        (out, None, Q, K, V, out.double(), lse, [True] * 7),
        (out, None, Q, K, V, out, lse.double(), [True] * 7),
        (out.sum().expand(out.shape), None, Q, K, V, out, lse, [True] * 7),
    ]:
        with pytest.raises((ValueError, RuntimeError)):
            torch.ops.ssmax.attention_backward(*arguments, *good)
    torch.ops.ssmax.attention_backward(out, None, Q, K, V, out, lse, [True] * 7, *good)
    operands = tuple((dict(zip(names, good)) | {"causal": True}).values())
    for lengths in ([7, 6], [-1, 6], [6], [2**62, 6]):
        with pytest.raises((ValueError, RuntimeError)):
            torch.ops.ssmax.decode(Q[:, :, :1], K, V, torch.tensor(lengths), False, *operands)


def test_random_calls_do_not_crash():
    """Draws extents, types, strides, masks and scores at random. The result has the right shape, or an exception is raised."""
    draw = random.Random(0)
    results = 0
    for _ in range(400):
        def extent(least=0, most=5):
            return draw.choice([least, 1, 2, 3, most, 17])

        def tensor(*shape, dtype=None):
            x = torch.rand(shape).to(dtype or draw.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16]))
            kind = draw.randrange(8)
            if kind == 0 and x.dim() >= 2:
                return x.transpose(-1, -2).contiguous().transpose(-1, -2)
            if kind == 1 and x.dim() >= 1 and x.shape[0] > 0:
                return x[:1].expand(x.shape)
            if kind == 2 and x.numel() > 0:
                return x.flatten()[:1].as_strided(x.shape, (0,) * x.dim())
            if kind == 3:
                return x * NAN
            return x.requires_grad_(draw.random() < 0.5)

        batch, heads, kv_heads, queries, keys, width = extent(), extent(), draw.choice([0, 1, 2]), extent(), extent(), extent()
        if draw.random() < 0.7 and kv_heads:
            heads = kv_heads * draw.choice([0, 1, 2])
        kind = draw.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.float16])
        q = tensor(batch, heads, queries, width, dtype=kind)
        k, v = tensor(batch, kv_heads, keys, width, dtype=kind), tensor(batch, kv_heads, keys, extent(), dtype=kind)
        what = {}
        try:
            if draw.random() < 0.6:
                what["mask"] = draw.choice([
                    lambda: mask.Causal(), lambda: mask.SlidingWindow(draw.randrange(-1, 9), draw.randrange(3)),
                    lambda: mask.Chunks(draw.randrange(9)), lambda: mask.CausalTopLeft(),
                    lambda: mask.KeyLengths([draw.randrange(-3, 9) for _ in range(batch)]), lambda: mask.PrefixLM([2] * batch),
                    lambda: mask.Documents([0, draw.randrange(9), queries], cu_seqlens_keys=[0, draw.randrange(9), keys]),
                    lambda: torch.rand(queries, keys) < 0.5, lambda: torch.rand(heads, 1, keys).log(),
                ])()  # fmt: skip
            if draw.random() < 0.5:
                what["scaling"] = draw.choice([
                    lambda: scaling.SSMax(tensor(heads), draw.choice([0.0, tensor(heads)])), lambda: scaling.PerQuery(tensor(heads, queries)),
                    lambda: scaling.SizeTable(tensor(keys)), lambda: scaling.LogN(), lambda: scaling.QwenLogN(draw.randrange(5)),
                ])()  # fmt: skip
            if draw.random() < 0.4:
                what["score"] = draw.choice([
                    lambda: score.Softcap(2), lambda: score.Alibi(tensor(heads), absolute=draw.random() < 0.5),
                    lambda: score.SlopedBias(tensor(queries, keys).detach(), tensor(heads).detach()), lambda: score.Bias(tensor(heads, queries, keys)),
                    lambda: score.Softcap(2) | score.Alibi(tensor(heads)) | score.Bias(tensor(1, keys)),
                ])()  # fmt: skip
            if draw.random() < 0.3:
                what["sinks"] = tensor(heads)
            if draw.random() < 0.3:
                what["rope"] = Rope(draw.choice([0, 2, 3, 16]), key_position=draw.choice([0, 5]))
            if draw.random() < 0.3:
                what["dropout_p"] = draw.choice([0.5, 1, 2])
            out = attention(q, k, v, **what)
            assert out.shape == (batch, heads, queries, v.shape[3]) and out.dtype == kind
            if out.requires_grad:
                out.sum().backward()
            results += 1
        except (ValueError, RuntimeError, TypeError):
            continue
    assert results > 50


def test_cuda_tensors_are_refused():
    """Uses fake tensors, which have a device but no memory. The test needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        here, there = torch.empty(1, 2, 4, 8), torch.empty(1, 2, 4, 8, device="cuda")
        for name, given in {"query": (there, here, here), "key": (here, there, here), "value": (here, here, there)}.items():
            with pytest.raises(ValueError, match=f"{name} is on cuda"):
                attention(*given)
