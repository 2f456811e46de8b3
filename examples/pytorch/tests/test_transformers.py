"""Compares models of `transformers`, with random weights, by this library and by their own eager attention."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers", reason="needs transformers: pip install 'examples/pytorch[clients]'")
from transformers.masking_utils import create_causal_mask  # noqa: E402

import ssmax_torch.transformers as adapter  # noqa: E402
from ssmax_torch import Rope, RopeScaling, attention  # noqa: E402
from ssmax_torch.mask import Causal, Mask  # noqa: E402
from ssmax_torch.scaling import SSMax  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
import sweep_transformers as sweep  # noqa: E402

adapter.register()
pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # large enough that attention is not uniform
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def config(name):
    if name == "llama":
        return hf.LlamaConfig(**SIZES)
    if name == "llama4":  # temperature tuning in the layer without RoPE, chunks in the others
        return hf.Llama4TextConfig(
            **SIZES,
            **EXPERTS,
            intermediate_size_mlp=96,
            no_rope_layers=[1, 0, 1],
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
            attention_chunk_size=10,
            attn_temperature_tuning=True,
            floor_scale=4,
            attn_scale=0.5,
        )
    if name == "ministral3":
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        }
        return hf.Ministral3Config(**SIZES, rope_parameters=rope)
    if name == "qwen3":
        return hf.Qwen3Config(**SIZES)
    if name == "gemma3":
        return hf.Gemma3TextConfig(**SIZES, layer_types=LAYERS, sliding_window=7, query_pre_attn_scalar=16)
    if name == "gemma2":  # attention's softcap: Gemma 3 has the option and ignores it
        return hf.Gemma2Config(
            **SIZES, layer_types=LAYERS, sliding_window=7, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
        )
    if name == "gpt_oss":
        return hf.GptOssConfig(**SIZES, **EXPERTS, layer_types=LAYERS, sliding_window=7)
    if name == "inkling":
        return hf.InklingTextConfig(
            **SIZES | {"num_hidden_layers": 2},
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=16,
            sliding_window_size=7,
            d_rel=8,
            rel_extent=12,
            local_layer_ids=[0],
            log_scaling_n_floor=4,
            log_scaling_alpha=0.5,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            logits_mup_width_multiplier=1.0,
        )
    raise AssertionError(name)


NAMES = ["llama", "llama4", "ministral3", "qwen3", "gemma3", "gemma2", "gpt_oss", "inkling"]


def model(name, implementation):
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config(name), attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():  # also sinks, norms and biases, which start at 0 or 1
        if parameter.dim() < 2:
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def tokens(batch=2, length=24):
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))


# Both compute in float32 and round differently. 3 layers of sums over at most 96 numbers, each with an error of 6e-8 of its
# terms, have an error of 1e-5 of the largest output. A gradient passes twice as many layers.
LOGITS, GRADIENTS = 1e-5, 1e-4


def assert_close(a, b, bound, what):
    assert a.abs().max() > 0, what
    assert (a - b).abs().max() <= bound * a.abs().max(), what


@pytest.fixture
def masks(monkeypatch):
    """Collects the masks of all calls of the library's attention."""
    seen, attention = [], adapter.attention

    def counted(*arguments, mask, **options):
        seen.append(mask)
        return attention(*arguments, mask=mask, **options)

    monkeypatch.setattr(adapter, "attention", counted)
    return seen


def is_structural(mask):
    return isinstance(mask, Mask) and mask.visible is None and mask.additive is None


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_eagers(name, masks):
    eager, ours = model(name, "eager"), model(name, "ssmax_softmax")
    x = tokens()
    expected, actual = eager(x, labels=x), ours(x, labels=x)
    assert len(masks) == ours.config.num_hidden_layers and all(map(is_structural, masks))
    assert_close(expected.logits, actual.logits, LOGITS, "logits")
    expected.loss.backward()
    actual.loss.backward()
    learning = 0
    for (what, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), what
        if a.grad is not None and a.grad.any():  # an expert without tokens has no gradient
            assert_close(a.grad, b.grad, GRADIENTS, what)
            learning += "attn" in what
    assert learning >= 4 * ours.config.num_hidden_layers


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_gives_the_same_tokens(name, masks):
    x = tokens(length=9)  # longer than windows, chunks and the temperature's floor
    settings = {"max_new_tokens": 16, "do_sample": False}
    expected = model(name, "eager").generate(x, **settings)
    ours = model(name, "ssmax_softmax")
    assert torch.equal(expected, ours.generate(x, **settings))
    assert all(map(is_structural, masks)) and len(masks) == 16 * ours.config.num_hidden_layers
    assert torch.equal(expected, ours.generate(x, use_cache=False, **settings))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(name, side, masks):
    x, lengths = tokens(), torch.tensor([24, 15])
    position = torch.arange(24) if side == "right" else torch.arange(24).flip(0)
    padding = position < lengths[:, None]
    x = x.where(padding, 0)
    expected = model(name, "eager")(x, attention_mask=padding.long()).logits
    actual = model(name, "ssmax_softmax")(x, attention_mask=padding.long()).logits
    if side == "right" and name != "llama4":  # its chunks begin at the first token of each row
        assert all(map(is_structural, masks))
    if side == "right" and name in ("llama", "ministral3", "qwen3"):  # every query has a visible key
        padding = torch.ones_like(padding)
    assert_close(expected[padding], actual[padding], LOGITS, "logits")


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_packed_sequences_do_not_see_each_other(name, masks):
    x = tokens(batch=1)
    position_ids = torch.cat([torch.arange(n) for n in (11, 1, 12)])[None]
    expected = model(name, "eager")(x, position_ids=position_ids, use_cache=False).logits
    actual = model(name, "ssmax_softmax")(x, position_ids=position_ids, use_cache=False).logits
    assert all(map(is_structural, masks)) or name == "llama4"
    assert_close(expected, actual, LOGITS, "logits")
    alone = model(name, "ssmax_softmax")(x[:, 12:]).logits
    if name != "llama4":  # its temperature depends on the place in the whole row
        assert_close(alone, actual[:, 12:], LOGITS, "the last sequence alone")


def test_a_static_cache_and_a_mask_of_ones_own(masks):
    x = tokens(length=9)
    eager, ours = model("qwen3", "eager"), model("qwen3", "ssmax_softmax")
    settings = {"max_new_tokens": 8, "do_sample": False}
    static = ours.generate(x, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(eager.generate(x, **settings), static)
    every_other = torch.ones(9, 9, dtype=torch.bool).tril()[None, None] & (torch.arange(9) % 2 == 0)
    additive = torch.zeros(every_other.shape).masked_fill(~every_other, float("-inf"))
    # Eager adds the mask to the logits: True would add 1.
    assert_close(eager(x, attention_mask=additive).logits, ours(x, attention_mask=every_other).logits, LOGITS, "")
    assert masks[-1] is every_other


@torch.no_grad()
def test_a_compiled_model_is_one_graph():
    ours, x = model("gemma3", "ssmax_softmax"), tokens(length=12)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    passed = {"use_cache": False, "num_items_in_batch": torch.tensor(3)}
    assert_close(ours(x, use_cache=False).logits, compiled(x, **passed).logits, LOGITS, "logits")


def test_masks_become_what_they_are():
    """Tests the result of `make_mask` for each mask of transformers. An unknown mask stays a matrix."""
    settings = config("llama")
    settings._attn_implementation = "ssmax_softmax"
    embeddings = torch.empty(2, 6, 0)
    causal = create_causal_mask(settings, embeddings, None, None)
    assert causal.mask.causal and causal.mask.window is None and causal.mask.cu_queries is None
    ones_own = create_causal_mask(settings, embeddings, None, None, or_mask_function=lambda b, h, q, k: k < 2)
    assert ones_own.dtype == torch.bool and ones_own.shape == (2, 1, 6, 6) and ones_own[0, 0, 0, 1]


@torch.no_grad()
def test_a_mask_is_used_as_a_tensor():
    """What models do to a mask before attention gives the same as with sdpa's mask."""
    shown = torch.arange(6) < torch.tensor([6, 4])[:, None]
    settings, embeddings = config("llama"), torch.empty(2, 6, 0)
    made = []
    for settings._attn_implementation in ("sdpa", sweep.NAME):
        made.append(create_causal_mask(settings, embeddings, shown, None))
    expected, ours = made
    assert type(ours) is not type(expected)
    for each in (
        lambda mask: torch.tensor([*mask.shape, mask.ndim, mask.size(-1), mask.dtype == torch.bool, mask.device.type == "cpu"]),
        lambda mask: mask[:, :, :, :5],
        lambda mask: mask[..., -1:, :].to(torch.float32),
        lambda mask: ~mask | (mask == 0),
        lambda mask: mask[:1].expand(2, 4, 6, 6),
        lambda mask: torch.where(mask, 0.0, -1.0) + torch.zeros(2, 1, 6, 6).masked_fill(~mask, 3.0),
        lambda mask: mask.repeat_interleave(2, dim=0).index_select(0, torch.tensor([3])),
        lambda mask: torch.cat([mask, mask], dim=-1).sum(),
        lambda mask: mask.clone().masked_fill_(torch.ones_like(mask), False),
    ):
        result = each(ours)
        assert type(result) is torch.Tensor and torch.equal(result, each(expected))
    assert ours.contiguous() is ours and ours.to("cpu") is ours and "True, False" in repr(ours)


def test_dropout():
    """In training, a model drops weights with the probability attention_dropout; in evaluation, it drops no weight."""
    settings = config("qwen3")
    settings.attention_dropout = 0.1
    made = hf.AutoModelForCausalLM.from_config(settings, attn_implementation="ssmax_softmax")
    torch.manual_seed(0)
    first, second = (made.train()(tokens()).logits for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(made(tokens()).logits, first)
    assert torch.equal(*(made.eval()(tokens()).logits for _ in range(2)))


UNUSUAL = [
    "inkling2_text",  # sinks of each query
    "deepseek_v32",  # indices of keys
    "hy_v4",  # indices of keys, and sinks
    "minimax_m3_vl_text",  # indices of blocks of keys
    "deepseek_v4",  # compressed keys, appended to the others
    "doge",  # a mask that the layer changes
]


@pytest.mark.parametrize("name", [*UNUSUAL, "mistral", "gemma3_text", "llama4_text"])
def test_models_of_the_sweep(name):
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"needs a version of transformers that has {name}")
    results = sweep.check("causal", name, seconds=60)
    assert isinstance(results, dict), results
    expected = dict.fromkeys(sweep.CHECKS[:-2], "equal")
    for _, check in (pair for pair in sweep.EXPECTED if pair[0] == name):
        assert results.pop(check) > 0.01 and expected.pop(check)
    if name in ("inkling2_text", "deepseek_v4"):  # eager has no static cache either
        expected["static"] = "–"
    assert {check: sweep.cell(check, results[check]) for check in expected} == expected


def test_the_sweep_reports_a_perturbed_scale():
    results = sweep.check("causal", "llama", seconds=60, perturb=1.05)
    assert sweep.status(results) == "differs"
    for check in ("logits", "gradients", "padding", "packed", "bfloat16"):
        assert "differs" in sweep.cell(check, results[check]), check


def bert(implementation):
    settings = hf.BertConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    return hf.AutoModelForMaskedLM.from_config(settings, attn_implementation=implementation).eval()


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_padding_of_an_encoder_is_no_matrix(side, masks):
    """Padding at the end becomes lengths. Padding elsewhere becomes a row of keys for each sequence."""
    x, lengths = tokens(), torch.tensor([24, 15 if side != "none" else 24])
    position = torch.arange(24) if side != "left" else torch.arange(24).flip(0)
    shown = position < lengths[:, None]
    expected = bert("eager")(x, attention_mask=shown.long()).logits
    actual = bert(sweep.NAME)(x, attention_mask=shown.long()).logits
    assert_close(expected[shown], actual[shown], LOGITS, "logits")
    assert len(masks) == 2
    for mask in masks:
        if side == "none":
            assert mask is None
        elif side == "right":
            assert is_structural(mask) and torch.equal(mask.lengths, lengths)
        else:
            assert mask.visible.shape == (2, 1, 1, 24)


IGNORE_THE_INTERFACE = [
    lambda: hf.XLNetConfig(vocab_size=VOCABULARY, d_model=64, n_layer=2, n_head=4, d_inner=96),
    lambda: hf.XLMConfig(vocab_size=VOCABULARY, emb_dim=64, n_layers=2, n_heads=4),
    lambda: hf.DebertaV2Config(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
]


@pytest.mark.parametrize("settings", IGNORE_THE_INTERFACE)
def test_a_model_that_would_ignore_a_scaling_is_an_error(settings):
    with pytest.raises(ValueError, match="has attention of its own and ignores the scaling of 'own_s', attn_implementation"):
        hf.AutoModel.from_config(settings(), attn_implementation="own_s")
    hf.AutoModel.from_config(settings(), attn_implementation=sweep.NAME)  # plain softmax raises no error


CHOOSE_A_CLASS = [
    lambda: hf.FalconConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
    lambda: hf.GPTNeoConfig(vocab_size=VOCABULARY, hidden_size=64, num_layers=2, attention_types=[[["global", "local"], 1]]),
    lambda: hf.GitConfig(),
    lambda: hf.SamConfig(),
    lambda: hf.SamHQConfig(),
    lambda: hf.Data2VecVisionConfig(num_hidden_layers=1),
]


@pytest.mark.parametrize("settings", CHOOSE_A_CLASS)
def test_a_model_that_chooses_a_class_of_attention_is_an_error(settings):
    with pytest.raises(ValueError, match="has none for 'ssmax_softmax', attn_implementation must be one of .'eager'"):
        with torch.device("meta"):
            hf.AutoModel.from_config(settings(), attn_implementation=sweep.NAME)
    with torch.device("meta"):
        hf.AutoModel.from_config(settings(), attn_implementation="eager")


def interface(module=None, queries=6, keys=6, mask=None, name=sweep.NAME, **options):
    """Calls the function of AttentionInterface, with one head of width 8."""
    q, k, v = (torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(n)) for n in (queries, keys, keys))
    return hf.AttentionInterface()[name](module or nn.Identity(), q, k, v, mask, **options)[0]


def test_an_argument_that_eager_reads_and_ours_does_not_is_an_error():
    """A layer's own eager attention says which arguments change attention. Other arguments only pass through."""
    made = model("llama", sweep.NAME)
    layer, one = made.model.layers[0].self_attn, torch.ones(1)
    passed = {"num_items_in_batch": one, "labels": one, "cu_seq_lens_q": one, "token_type_ids": one, "anything": one}
    assert torch.equal(interface(layer, **passed), interface(layer))
    file = sys.modules[type(layer).__module__]
    theirs = file.eager_attention_forward

    def signature(module, query, key, value, attention_mask, first=None, **options):
        return options.get("second")

    adapter._read_by_eager.cache_clear()
    file.eager_attention_forward = signature
    try:
        with pytest.raises(ValueError, match="LlamaAttention passes first, second, which"):
            interface(layer, first=2.0, second=one, **passed)
    finally:
        file.eager_attention_forward = theirs
        adapter._read_by_eager.cache_clear()


def test_a_tensor_of_a_layer_without_eager_attention_is_an_error():
    with pytest.raises(ValueError, match="Identity passes first, second, which"):
        interface(first=torch.ones(1), second=torch.ones(1), position_ids=torch.arange(6), sliding_window=3)
    interface(position_ids=torch.arange(6), sliding_window=3, num_items_in_batch=torch.ones(1))


def test_a_mask_for_another_number_of_keys_is_an_error():
    settings = config("llama")
    settings._attn_implementation = sweep.NAME
    structured = create_causal_mask(settings, torch.empty(1, 6, 0), None, None)
    for mask in (structured, torch.ones(1, 1, 6, 6, dtype=torch.bool)):
        interface(mask=mask)
        message = "attention_mask has 6 queries and 6 keys, query has {} and key has {}: must be equal"
        with pytest.raises(ValueError, match=message.format(6, 8)):
            interface(keys=8, mask=mask)
        with pytest.raises(ValueError, match=message.format(4, 6)):
            interface(queries=4, mask=mask)
    assert torch.equal(interface(mask=torch.ones(1, 1, 1, 6, dtype=torch.bool)), interface())


def test_no_mask_is_none():
    """Without a mask, every key is visible. Exception: the module asks for a causal mask."""
    every = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    assert torch.equal(interface(), interface(mask=every))
    assert torch.equal(interface(is_causal=True), interface(mask=every.tril()))


def test_a_model_with_attention_of_its_own_is_an_error():
    settings = hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)
    made = hf.AutoModelForCausalLM.from_config(settings, attn_implementation=sweep.NAME)
    with pytest.raises(ValueError, match="the model of BloomConfig has attention of its own"):
        made(tokens())


def scaled(module, query, key, value, attention_mask, scaling, **_):
    """The reference: softmax(s · ln n · logits) in plain PyTorch, with the n of each query."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    n = (attention_mask == 0).sum(dim=-1, keepdim=True).clamp_min(1)
    logits = module.s[:, None, None] * n.log() * scaling * query @ key.mT + attention_mask
    return (logits.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


hf.AttentionInterface.register("scaled_reference", scaled)
hf.AttentionMaskInterface.register("scaled_reference", hf.AttentionMaskInterface()["eager"])
adapter.register("own_s", scaling=lambda module: SSMax(module.s))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_scaling_is_learnt_by_every_layer(name, padded):
    x = tokens()
    shown = torch.arange(24) < torch.tensor([24, 15])[:, None]
    made = [model(name, implementation).double() for implementation in ("scaled_reference", "own_s")]
    for each in made:
        for i, layer in enumerate(each.model.layers):
            layer.self_attn.s = nn.Parameter(torch.linspace(0.3, 0.6, 4) + 0.1 * i)
    expected, actual = (each(x, attention_mask=shown.long() if padded else None).logits for each in made)
    rows = shown if padded else slice(None)
    assert_close(expected[rows], actual[rows], LOGITS, "logits")
    for logits in (expected, actual):
        logits[rows].square().sum().backward()
    for a, b in zip(*(each.model.layers for each in made)):
        assert_close(a.self_attn.s.grad, b.self_attn.s.grad, GRADIENTS, "s")
    settings = {"max_new_tokens": 8, "do_sample": False}
    generated = made[1].generate(x[:, :9], **settings)
    assert torch.equal(generated, made[1].generate(x[:, :9], use_cache=False, **settings))
    plain = model(name, sweep.NAME).double()(x).logits
    assert (plain - actual).abs().max() > 0.1 * plain.abs().max()


def test_the_lowest_number_of_a_mask_is_not_a_key():
    """n excludes keys that an additive mask masks by the lowest number of its type."""
    module = nn.Identity()
    module.s = torch.tensor([0.7])
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    expected = interface(module, mask=visible, name="own_s")
    for dtype in (torch.float32, torch.bfloat16):
        additive = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        assert_close(expected, interface(module, mask=additive, name="own_s"), 1e-6, dtype)


def test_a_rope_with_positions_is_that_of_qwen2_5_vl():
    """positions and axes are position_ids and mrope_section of the model. inv_freq of the model is float32."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as own

    sections, theta = [2, 3, 3], 1e6
    parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    settings = hf.Qwen2_5_VLTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 20, 16) for heads in (4, 2, 2))
    positions = torch.randint(100, (3, 2, 20))
    turned = own.apply_rotary_pos_emb(q, k, *own.Qwen2_5_VLRotaryEmbedding(settings)(q, positions))
    axes = [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    actual = attention(q, k, v, mask=Causal(), rope=Rope(16, theta, positions=positions, axes=axes))
    assert_close(attention(*turned, v, mask=Causal()), actual, 1e-5, "out")


@pytest.mark.parametrize("length", [10, 64, 65, 300])
def test_dynamic_ntk_is_that_of_llama(length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    settings = hf.LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=parameters)
    theirs, factor = ROPE_INIT_FUNCTIONS["dynamic"](settings, "cpu", seq_len=length)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 20, 16) for heads in (4, 2, 2))
    ours = Rope(16, 1e4, scaling=RopeScaling.dynamic_ntk(2.0, 64, length))
    expected = attention(q, k, v, rope=Rope(16, frequencies=theirs, attention_factor=factor))
    assert_close(expected, attention(q, k, v, rope=ours), 1e-5, "out")
