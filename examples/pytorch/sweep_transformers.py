"""Compares every model of transformers with the attention of ssmax_torch to its own eager attention.

Each model is small and has random weights. The checks of a model:

    logits      the output, relative to the largest logit
    gradients   of every parameter, relative to its largest gradient, or to a thousandth of the model's largest
    padding     the output at real tokens, with padding on the left and on the right
    generation  the greedy tokens, with a cache
    static      the greedy tokens, with a static cache
    packed      the output for three sequences in one row
    trainer     the loss, with the arguments that Trainer passes
    bfloat16    the output under autocast: its distance from float32 is at most twice that of eager's output. The distance
                is the median over positions, because rounding sends one token in fifty to another expert
    images      the output for a text with an image

An output is equal within 5e-5 of the largest logit, or within twice the distance of eager's output from float64.
The tokens of generation are equal.

The script prints one line per model, writes a table with --write, and exits with 1 if an output differs for another reason
than the one that EXPECTED names.

--perturb 1.05 multiplies the scale of our attention by 1.05: every model that calls our attention must then differ. Before a
whole sweep, the script checks one model in this way. It exits with 2 unless logits, gradients, padding, packed sequences and
Trainer's loss differ.
"""

import argparse
import contextlib
import copy
import inspect
import itertools
import re
import signal
import sys
import warnings

import torch
import transformers
from transformers.models.auto import modeling_auto

import ssmax_torch.transformers as adapter

NAME = "ssmax_softmax"
KINDS = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
    "masked": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
    "seq2seq": (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
}
KINDS["image-text"] = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, transformers.AutoModelForImageTextToText
_named = {name for names, _ in KINDS.values() for name in names}
KINDS["base"] = [name for name in modeling_auto.MODEL_MAPPING_NAMES if name not in _named], transformers.AutoModel
# Configurations that no Auto class makes a model of.
PARTS = sorted(set(transformers.CONFIG_MAPPING) - _named - set(KINDS["base"][0]))
CHECKS = ("logits", "gradients", "padding", "generation", "static", "packed", "trainer", "bfloat16", "images")
BOUNDS = {"logits": 5e-5, "gradients": 1e-3, "padding": 5e-5, "packed": 5e-5, "trainer": 5e-5, "images": 5e-5}
NO_KEY = "a token sees no key: eager returns the mean of the values, ours returns 0"
# Checks in which a model differs, and why.
EXPECTED = {("minimax_m3_vl", "padding"): NO_KEY, ("minimax_m3_vl_text", "padding"): NO_KEY, ("minimax_m3_vl_text", "packed"): NO_KEY}
OWN = "attends without the interface"
NO_CLASS = "KeyError: the model chooses a class of attention by attn_implementation and has none for a registered name"
VOCABULARY, LENGTH, LARGEST, IMAGE = 97, 24, 40_000_000, 95

# Values of configurations. A configuration gets each value that its constructor accepts.
SIZES = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "backbone_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("hidden_dim", "d_inner", "ffn_hidden_size", "expert_ffn_hidden_size", "block_ff_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "index_n_heads", "linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_kv", "d_head", "dim_head", "kv_channels", "index_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "linear_key_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "query_pre_attn_scalar", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "d_rel", "o_lora_rank"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "index_topk_blocks", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "o_groups"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "local_attention"), 7),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "keep_window_size"), 10),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id", "pad_index"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), VOCABULARY - 1),
    **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id"), None),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),  # large enough that attention's weights are not uniform
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "rel_extent": 12},
    **{"log_scaling_n_floor": 4, "index_block_size": 4, "index_kpool": 5, "floor_scale": 4},
    # Images and sound.
    **{"image_size": 32, "patch_size": 8, "temporal_patch_size": 1, "out_hidden_size": 64, "projection_dim": 64},
    **{"depth": 2, "embed_dim": 64, "max_source_positions": 32, "encoder_layers": 2, "encoder_attention_heads": 4},
}
# Positions in three sections, for heads of width 16.
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
# Values that replace or complete SIZES, per model.
OF_ITS_OWN = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), SECTIONS),
    **dict.fromkeys(("glm4v_text", "glm46v_text", "glm_ocr_text", "glm_image_text", "glmga_text"), SECTIONS),
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    | {"n_input_layers": 2, "n_output_layers": 2, "n_recurrent_layers": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "glm4v_moe_text": {"rope_parameters": SECTIONS["rope_parameters"] | {"mrope_section": [2, 1, 1]}},
    "qwen3_vl_moe_text": {"num_experts": 4},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "inkling2_vision": {"text_hidden_size": 64},
    "molmo2_adapter": {"vision_feature_layers": [2, 1], "vision_feature_layer": [2, 1]},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4, "intermediate_size": 96, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]},
    "mobilebert": {"initializer_range": 0.02},  # with 0.2, logits are 1e14 and their rounding is 1e7: no backward
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [32, 32]},
    "zaya": {"num_experts_per_tok": 1},
}


def configuration(name):
    """Returns a small configuration of the model `name`, with a layer of every type of its default."""
    return small(type(transformers.AutoConfig.for_model(name)), **OF_ITS_OWN.get(name, {}))


def small(kind, **own):
    """Returns a small configuration of a class of configurations, with the values `own`."""
    parameters = inspect.signature(kind.__init__).parameters
    made = kind()
    default = made.to_dict()
    optional = {"head_dim", "num_key_value_heads", "decoder_start_token_id", "bos_token_id", "eos_token_id"}
    sizes = {key: value for key, value in SIZES.items() if key in parameters}
    sizes = {key: value for key, value in sizes.items() if default.get(key) is not None or key in optional}
    sizes = {key: value for key, value in sizes.items() if not isinstance(default.get(key), (list, tuple, dict))}
    if "kv_lora_rank" in parameters:  # every head has its own keys
        sizes["num_key_value_heads"] = 4
    layers = default.get("num_hidden_layers") or 0
    for key in parameters:
        types = default.get(key)
        if isinstance(types, (list, tuple)) and layers > 3 and len(types) == layers:
            different = list(dict.fromkeys(types))
            sizes[key] = list(itertools.islice(itertools.cycle(different), max(3, len(different))))
            sizes["num_hidden_layers"] = len(sizes[key])
    for key in getattr(kind, "sub_configs", {}):
        if isinstance(part := getattr(made, key, None), transformers.PretrainedConfig):
            sizes[key] = small(type(part), **OF_ITS_OWN.get(part.model_type, {})).to_dict()
    for key in ("image_token_id", "image_token_index"):
        if key in parameters:
            sizes[key] = IMAGE
    return kind(**sizes | own)


class Model:
    """A model with eager attention and the same model with ours."""

    def __init__(self, kind, name):
        self.name, self.kind, self.rounding = name, kind, 0.0
        settings, factory = configuration(name), KINDS[kind][1]
        if kind == "causal" and hasattr(settings, "is_decoder"):
            settings.is_decoder, settings.is_encoder_decoder = True, False
        if kind == "seq2seq":
            settings.decoder_start_token_id = settings.pad_token_id = 0
        with torch.device("meta"):
            count = sum(p.numel() for p in factory.from_config(settings).parameters())
        if count > LARGEST:
            raise Skipped(f"its smallest configuration has {count:,} parameters")
        torch.manual_seed(0)
        self.eager = factory.from_config(configuration_copy(settings), attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.eager.parameters():
            if parameter.dim() < 2:  # biases, norms and sinks
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        self.ours = factory.from_config(configuration_copy(settings), attn_implementation=NAME).eval()
        self.ours.load_state_dict(self.eager.state_dict())
        self.accepted = inspect.signature(self.eager.forward).parameters
        self.decoder = {"decoder_input_ids": tokens(2, 9)} if kind == "seq2seq" and self.reads_tokens() else {}
        self.numbers = {}
        if kind == "base":
            self.numbers = self.first_accepted()

    def reads_tokens(self):
        return self.eager.main_input_name == "input_ids"

    def inputs(self, x, **more):
        """Returns the arguments of a forward for tokens x. A model that reads no tokens gets random numbers."""
        main = {"input_ids": x} | self.numbers
        main = main if self.reads_tokens() else self.numbers
        return main | {k: v for k, v in more.items() if k in self.accepted}

    def first_accepted(self):
        """Returns the first random images, spectra or sound that eager accepts beside tokens."""
        error = None
        for self.numbers in candidates(self.eager.config, self.eager.main_input_name, self.accepted):
            try:
                self.eager(**self.inputs(tokens()))
                return self.numbers
            except TimeoutError:
                raise
            except Exception as each:
                error = error or each
        raise Skipped(f"eager fails: {first_line(error)}")

    def outputs(self, x, **more):
        """Returns eager's logits, and a function that returns ours."""
        more = self.inputs(x, **more, **{k: v[: len(x)] for k, v in self.decoder.items()}, use_cache=False)
        with eagers_own():
            expected = first(forward(self.eager, more))
        return expected, lambda: first(forward(self.ours, more))


def forward(model, arguments):
    """Returns the output of a model. A model that draws random numbers draws the same each time."""
    torch.manual_seed(5)
    return model(**arguments)


def first(output):
    """Returns the first floating tensor of a model's output."""
    values = output.values() if isinstance(output, dict) else output
    return next(x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point())


def candidates(settings, name, accepted):
    """Yields random numbers as images, spectra or sound that a model may accept."""
    part = getattr(settings, "vision_config", None) or getattr(settings, "audio_config", None) or settings
    if "grid_thw" in accepted:  # a row for each patch of two images
        extent = 3 * (getattr(part, "temporal_patch_size", None) or 1) * 8**2
        yield {next(iter(accepted)): random(2 * 16, extent), "grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    if name == "input_ids":
        yield {}
        if "pixel_values" not in accepted:
            return
    if name in ("input_ids", "pixel_values", "pixel_values_videos"):
        key = "pixel_values" if name == "input_ids" else name
        size = getattr(part, "image_size", None) or getattr(settings, "image_size", None) or 32
        channels = getattr(part, "num_channels", None) or 3
        for height, width in (size if isinstance(size, (list, tuple)) else (size, size), (64, 64), (224, 224)):
            yield {key: random(2, channels, height, width)}
            yield {key: random(2, getattr(part, "num_frames", None) or 4, channels, height, width)}
    elif name == "input_features":
        bins = getattr(part, "num_mel_bins", None) or getattr(part, "input_feat_per_channel", None) or 80
        length = 2 * (getattr(part, "max_source_positions", None) or 32)
        for bins in (bins, 80, 128, 160):
            for shape in ((2, bins, length), (2, length, bins)):
                yield {"input_features": random(*shape)}
                if "input_features_mask" in accepted:
                    yield {"input_features": random(*shape), "input_features_mask": torch.ones(2, length, dtype=torch.long)}
    elif name == "input_values":
        yield {"input_values": random(2, 4000)}
        yield {"input_values": random(2, 1, 4000)}
    else:
        raise Skipped(f"reads {name}")


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(4))


class Skipped(Exception):
    """Says why a model or a check is not possible with eager attention either."""


@contextlib.contextmanager
def eagers_own():
    """Skips the check if eager fails."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as error:
        raise Skipped(f"eager fails: {first_line(error)}") from error


def configuration_copy(settings):
    return type(settings).from_dict(settings.to_dict())


def tokens(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY - 1, (batch, length), generator=torch.Generator().manual_seed(2))


def distance(expected, actual, where=slice(None)):
    expected, actual = expected[where].float(), actual[where].float()
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(1e-30))


def logits(model):
    expected, ours = model.outputs(tokens())
    result = distance(expected, ours())
    if result > BOUNDS["logits"]:
        exact = forward(copy.deepcopy(model.eager).double(), in_double(model, use_cache=False))
        exact = first(exact)
        model.rounding = 2 * distance(exact, expected)
    return result


def gradients(model):
    expected, ours = model.outputs(tokens())
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (ours() * weights).sum().backward()
    result = distance_of_gradients(model.eager, model.ours)
    if result > BOUNDS["gradients"]:  # a choice, such as of the largest boxes, may hang on rounding
        exact = copy.deepcopy(model.eager).double()
        exact.zero_grad()
        (first(forward(exact, in_double(model, use_cache=False))) * weights).sum().backward()
        result = 0.0 if result <= 2 * distance_of_gradients(model.eager, exact.float()) else result
    return result


def distance_of_gradients(one, other):
    largest, distances = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None and p.numel()), []
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        if (a.grad is None) != (b.grad is None):
            raise AssertionError(f"{name} has a gradient in one of both")
        if a.grad is not None and a.numel():  # the gradient of a key's bias is 0 up to rounding
            scale = max(float(a.grad.abs().max()), 1e-3 * largest)
            distances.append(float((a.grad - b.grad).abs().max()) / scale)
    return max(distances)


def in_double(model, **more):
    """Returns the arguments of `tokens()` in float64."""
    inputs = model.inputs(tokens(), **model.decoder, **more)
    return {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in inputs.items()}


def needs_tokens(model):
    if not model.reads_tokens():
        raise Skipped("reads no tokens")


def trainer(model):
    """Compares the losses with what Trainer passes, where the model passes it to attention."""
    needs_tokens(model)
    if "labels" not in model.accepted:
        raise Skipped("has no labels")
    more = {"labels": model.decoder.get("decoder_input_ids", tokens()), "use_cache": False}
    more = model.inputs(tokens(), **more)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in model.accepted.values()):
        more["num_items_in_batch"] = torch.tensor(40)
    with eagers_own():
        expected = model.eager(**more).loss
    if expected is None:
        raise Skipped("returns no loss")
    return distance(expected[None], model.ours(**more).loss[None])


def images(model):
    """Compares the output for a text that has an image in it, where the model returns the features of an image."""
    if model.kind not in ("image-text", "causal") or not hasattr(model.eager, "get_image_features"):
        raise Skipped("reads no images")
    settings = model.eager.config
    if "image_grid_thw" in model.accepted:  # a row for each patch
        part = settings.vision_config
        extent = 3 * (getattr(part, "temporal_patch_size", None) or 1) * part.patch_size**2
        more = {"pixel_values": random(2 * 16, extent)}
        more["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
    else:
        more = next(candidates(settings, "pixel_values", ()))
    with eagers_own():
        features = model.eager.get_image_features(**more)
        features = features if not isinstance(features, dict) else features.get("pooler_output", first(features))
        length = sum(x.shape[:-1].numel() for x in features) // 2
        x = torch.cat([tokens(2, 5), torch.full((2, length), IMAGE), tokens(2, 7)], dim=1)
        more |= {"input_ids": x, "use_cache": False}
        for name in {"token_type_ids", "mm_token_type_ids"} & set(model.accepted):
            more[name] = (x == IMAGE).long()
        expected = first(model.eager(**more))
    return distance(expected, first(model.ours(**more)))


def padding(model):
    needs_tokens(model)
    x, largest = tokens(), 0.0
    for position in (torch.arange(LENGTH), torch.arange(LENGTH).flip(0)):
        shown = position < torch.tensor([LENGTH, LENGTH - 9])[:, None]
        expected, ours = model.outputs(x.where(shown, 0), attention_mask=shown.long())
        if not model.eager.config.is_encoder_decoder and expected.shape[:2] == shown.shape:
            largest = max(largest, distance(expected, ours(), shown))
        elif shown[1, 0]:  # a pool may be the first token, which sees no key if it is padding
            largest = max(largest, distance(expected, ours()))
    return largest


def generation(model, **settings):
    if model.kind in ("masked", "base") or not model.reads_tokens():
        raise Skipped("does not generate")
    x = tokens(2, 9)
    settings |= {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "num_beams": 1}
    if model.kind == "seq2seq":
        settings["decoder_start_token_id"] = 0
    with eagers_own():
        expected = model.eager.generate(x, **settings)
    return float((expected != model.ours.generate(x, **settings)).float().mean())


def static(model):
    if model.kind not in ("causal", "image-text"):
        raise Skipped("does not generate")
    settings = {"cache_implementation": "static", "disable_compile": True}
    return generation(model, **settings)


def packed(model):
    if model.kind not in ("causal", "image-text") or "position_ids" not in model.accepted:
        raise Skipped("does not take position_ids")
    positions = torch.cat([torch.arange(n) for n in (11, 1, 12)])[None]
    expected, ours = model.outputs(tokens(1), position_ids=positions)
    return distance(expected, ours())


def bfloat16(model):
    exact = model.outputs(tokens())[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded, ours = model.outputs(tokens())
        ours = ours()
    if exact.shape != rounded.shape:
        raise Skipped("rounding changes the output's length")
    return median_distance(exact, ours) / max(median_distance(exact, rounded), 5e-3)


def median_distance(expected, actual):
    distances = (expected.float() - actual.float()).abs().amax(dim=-1).flatten()
    return float(distances.median() / expected.abs().max().clamp_min(1e-30))


BOUNDS |= {"generation": 0.0, "static": 0.0, "bfloat16": 2.0}


def first_line(error):
    """Returns the beginning of a message, without the paths of this machine."""
    text = re.sub(r" from '/[^']*'", "", re.sub(r"\s+", " ", str(error).strip()))
    return text[:160] or type(error).__name__


def expire(*_):
    raise TimeoutError("takes too long")


def check(kind, name, seconds, perturb=1.0):
    """Returns the result of each check of one model: a distance, a text that begins with "error: ", or None. Multiplies
    the scale of our attention by `perturb`."""
    calls, attention = [], adapter.attention

    def counted(query, *arguments, scale=None, **options):
        calls.append(1)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attention(query, *arguments, scale=scale * perturb, **options)

    adapter.attention = counted
    signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        model = Model(kind, name)
        expected = model.outputs(tokens())[0]
        if not expected.numel() or not expected.isfinite().all():
            raise Skipped("eager's output is not finite")
        results = {}
        for each in CHECKS:
            try:
                with torch.set_grad_enabled(each == "gradients"):
                    results[each] = globals()[each](model)
                if each in ("logits", "padding", "packed", "images") and results[each] <= model.rounding:
                    results[each] = 0.0
            except Skipped:
                results[each] = None
            except Exception as error:
                results[each] = "error: " + first_line(error)
        if not calls and not any(isinstance(result, str) for result in results.values()):
            return OWN
        return results
    except KeyError as error:
        return NO_CLASS if error.args == (NAME,) else first_line(error)
    except Exception as error:
        return first_line(error)
    finally:
        signal.alarm(0)
        adapter.attention = attention


def cell(each, result, name=None):
    if result is None:
        return "–"
    if isinstance(result, str):
        return "error"
    if (name, each) in EXPECTED:
        return f"*{result:.1e}*"
    return "equal" if result <= BOUNDS[each] else f"**differs: {result:.1e}**"


def status(results, name=None):
    """Returns one word for the results of a model."""
    if isinstance(results, str):
        return results if results == OWN else "not compared"
    errors = {result for result in results.values() if isinstance(result, str)}
    if any("has attention of its own" in error for error in errors):
        return "refused"
    cells = [cell(each, result, name) for each, result in results.items()]
    return "differs" if any("differs" in text for text in cells) else "error" if errors else "equal"


def document(rows):
    """Yields the lines of the markdown file."""
    named = {key: status(results, key[1]) for key, results in rows.items()}
    names = lambda *kinds: ", ".join(f"{name} ({kind})" for (kind, name), value in named.items() if value in kinds)
    numbers = {value: list(named.values()).count(value) for value in ("equal", "error", "differs", "refused", OWN)}
    yield "# Models of transformers, compared to eager attention"
    yield ""
    yield f"`sweep_transformers.py` writes this file (transformers {transformers.__version__}, torch {torch.__version__})."
    yield "`python examples/pytorch/sweep_transformers.py --help` says what each check compares. – is: eager cannot do it either."
    yield ""
    yield "| models | count |"
    yield "|---|---|"
    yield f"| equal to eager in every check | {numbers['equal']} |"
    yield f"| equal, with an error in some checks | {numbers['error']} |"
    yield f"| different from eager | {numbers['differs']} |"
    yield f"| refused: attention of their own | {numbers['refused']} |"
    yield f"| attention of their own, without an error | {numbers[OWN]} |"
    yield ""
    yield f"| model | kind | {' | '.join(CHECKS)} |"
    yield "|---" * (2 + len(CHECKS)) + "|"
    for (kind, name), results in rows.items():
        if named[kind, name] in ("equal", "error", "differs"):
            yield f"| {name} | {kind} | {' | '.join(cell(each, results[each], name) for each in CHECKS)} |"
    yield ""
    yield "In italics: the distance is expected."
    yield ""
    for (name, each), reason in EXPECTED.items():
        yield f"- {name}, {each}: {reason}"
    yield ""
    yield "## Errors"
    yield ""
    for (kind, name), results in rows.items():
        if named[kind, name] == "error":
            for error in dict.fromkeys(result for result in results.values() if isinstance(result, str)):
                yield f"- {name} ({kind}): {error.removeprefix('error: ')}"
    yield ""
    yield "## Models with attention of their own"
    yield ""
    yield f"Refused with an error: {names('refused')}."
    yield ""
    yield f"Not refused, and unchanged: {names(OWN)}."
    yield "With a scaling, a model among these that has attention raises an error when it is made."
    yield ""
    yield "## Models that the script cannot compare"
    yield ""
    for (kind, name), results in rows.items():
        if named[kind, name] == "not compared":
            yield f"- {name} ({kind}): {results}"
    yield ""
    yield "No Auto class makes a model of these configurations, which are parts of other models or of pipelines:"
    yield f"{', '.join(PARTS)}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models (default: all)")
    parser.add_argument("--seconds", type=int, default=120, help="for one model")
    parser.add_argument("--write", help="a markdown file for the table")
    parser.add_argument("--perturb", type=float, default=1.0, help="factor of the scale, to see that models then differ")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    adapter.register(NAME)
    todo = [(kind, name) for kind, (names, _) in KINDS.items() for name in names]
    todo = [pair for pair in todo if not options.models or pair[1] in options.models]
    if not options.models and options.perturb == 1.0:
        control = check("causal", "llama", options.seconds, perturb=1.05)
        print(f"control: {control}", flush=True)
        if any(control[each] <= BOUNDS[each] for each in ("logits", "gradients", "padding", "packed", "trainer")):
            sys.exit(2)
    rows, differing = {}, 0
    for i, (kind, name) in enumerate(todo, 1):
        rows[kind, name] = results = check(kind, name, options.seconds, options.perturb)
        text = results
        if isinstance(results, dict):
            cells = {each: cell(each, results[each], name) for each in CHECKS}
            differing += status(results, name) == "differs"
            errors = " | ".join(dict.fromkeys(r for r in results.values() if isinstance(r, str)))
            text = " ".join(cells.values()) + (f" ({errors})" if errors else "")
        print(f"[{i}/{len(todo)}] {kind} {name}: {text}", flush=True)
    if options.write:
        with open(options.write, "w") as file:
            file.write("\n".join(document(rows)) + "\n")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
