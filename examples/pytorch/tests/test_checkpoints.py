"""Models of `transformers` with SSMax: trained by Trainer, saved and loaded."""

import pytest
import torch

hf = pytest.importorskip("transformers", reason="needs transformers: pip install 'examples/pytorch[clients]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'examples/pytorch[clients]'")

import ssmax_torch.transformers as adapter  # noqa: E402
from ssmax_torch.scaling import LogN  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 4,
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def model(name, implementation):
    torch.manual_seed(0)
    settings = hf.AutoConfig.for_model(name, **SIZES | MODELS[name])
    return hf.AutoModelForCausalLM.from_config(settings, attn_implementation=implementation)


def losses(made, folder):
    """Returns the losses of three steps of Trainer."""
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": (x := torch.randint(1, 61, (20,), generator=generator)), "labels": x} for _ in range(12)]
    settings = hf.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,  # Trainer then passes num_items_in_batch
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = hf.Trainer(made, settings, train_dataset=data)
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize("name", MODELS)
def test_trainer_trains_as_with_sdpa(name, tmp_path):
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"needs a version of transformers that has {name}")
    adapter.register()
    eagers_own = "eager" if name == "gpt_oss" else "sdpa"  # sdpa has no sinks
    expected, actual = (losses(model(name, each), tmp_path) for each in (eagers_own, "ssmax_softmax"))
    assert len(expected) == 3 and expected.unique().numel() == 3
    assert torch.allclose(expected, actual, rtol=1e-4, atol=0)  # Trainer rounds to five digits


def scalings(made):
    return {name: x for name, x in made.state_dict().items() if ".ssmax." in name}


@pytest.mark.parametrize("bias", [False, True])
def test_trained_parameters_are_saved_and_loaded(bias, tmp_path):
    plain, x = model("llama", "sdpa"), torch.arange(1, 21)[None]
    plain.save_pretrained(tmp_path / "softmax")
    ours = adapter.add_ssmax(plain, bias=bias, start=0.17)
    assert len(scalings(ours)) == (4 if bias else 2)
    before = ours(x).logits
    losses(ours, tmp_path / "trainer")
    trained = scalings(ours)
    assert all((value != (0.17 if name.endswith(".s") else 0)).all() for name, value in trained.items())
    expected = ours(x).logits
    assert (expected - before).abs().max() > 0.01
    ours.save_pretrained(tmp_path / "ssmax")

    adapter.register_ssmax(bias=bias, start=0.17)
    load = lambda folder: hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / folder, attn_implementation="ssmax", output_loading_info=True
    )
    loaded, report = load("ssmax")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(value, trained[name]) for name, value in scalings(loaded).items())
    assert torch.equal(loaded(x).logits, expected)
    adapter.add_ssmax(loaded, bias=bias, start=3)  # parameters that exist stay
    assert torch.equal(loaded(x).logits, expected)

    new = model("llama", "ssmax")
    new.load_state_dict(ours.state_dict())
    assert torch.equal(new(x).logits, expected)

    adapter.register_ssmax(bias=bias, start=0.17)
    started, report = load("softmax")  # a checkpoint of softmax lacks s and starts with it
    assert len(report["missing_keys"]) == len(trained) and not report["unexpected_keys"]
    assert torch.equal(started(x).logits, before)


def test_a_layer_without_parameters_is_an_error():
    adapter.register_ssmax()
    made = model("llama", "sdpa")
    made.set_attn_implementation("ssmax")
    assert not scalings(made)
    with pytest.raises(ValueError, match=r"LlamaAttention has no parameters of SSMax: call add_ssmax\(model\)"):
        made(torch.arange(1, 21)[None])


def test_a_model_with_attention_of_its_own_gets_no_parameters():
    made = hf.AutoModel.from_config(hf.XLNetConfig(vocab_size=61, d_model=32, n_layer=1, n_head=4, d_inner=48))
    with pytest.raises(ValueError, match="XLNetModel has attention of its own, it cannot have parameters of SSMax"):
        adapter.add_ssmax(made)


def test_a_name_with_another_scaling_makes_no_parameters():
    adapter.register_ssmax()
    assert scalings(model("llama", "ssmax"))
    adapter.register("ssmax", scaling=LogN())
    assert not scalings(model("llama", "ssmax"))


def test_returned_weights_are_none_with_a_warning(caplog):
    adapter.register()
    made = model("llama", "ssmax_softmax")
    hf.utils.logging.get_logger("transformers").propagate = True
    with caplog.at_level("WARNING"):
        made(torch.arange(1, 21)[None], output_attentions=True)
    assert "output_attentions is True" in caplog.text
