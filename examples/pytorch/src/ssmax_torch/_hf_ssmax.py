"""Parameters s (and b) of SSMax in the layers of `transformers` models: trained, saved and loaded with the model."""

from __future__ import annotations

from functools import cache
from inspect import unwrap

from torch import nn
from transformers import PreTrainedModel, initialization

from ._modules import SSMax

# The arguments of SSMax for the names of implementations whose layers get parameters.
_trained: dict[str, dict] = {}


def train(name: str, **options: object) -> None:
    """Lets every layer that a model makes with attn_implementation=name have a module SSMax, `layer.ssmax`."""
    _trained[name] = options
    _install()


def forget(name: str) -> None:
    """Ends what `train` began."""
    _trained.pop(name, None)


def add(model: nn.Module, name: str) -> None:
    """Gives each layer of attention of a model that has no module SSMax one. Throws if the model has no such layer."""
    layers = [module for module in model.modules() if _is_attention(module)]
    if not layers:
        raise ValueError(f"ssmax: {type(model).__name__} has attention of its own, it cannot have parameters of SSMax")
    for layer in layers:
        if not hasattr(layer, "ssmax"):
            weight = next((x for x in layer.parameters() if x.is_floating_point()), None)
            layer.ssmax = _made(layer, name).to(None if weight is None else weight.device)


@cache
def _install() -> None:
    # PyTorch calls this hook when a module becomes part of another.
    nn.modules.module.register_module_module_registration_hook(_add_when_made)

    # transformers initializes the parameters that a checkpoint lacks by the class of their module.
    theirs = PreTrainedModel._initialize_weights

    def initialize(model: PreTrainedModel, module: nn.Module, *arguments: object) -> None:
        if isinstance(module, SSMax):  # these functions leave a loaded parameter as it is
            initialization.constant_(module.s, module.start)
            if module.b is not None:
                initialization.zeros_(module.b)
        theirs(model, module, *arguments)

    PreTrainedModel._initialize_weights = initialize


def _add_when_made(parent: nn.Module, name: str, module: nn.Module) -> None:
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation in _trained and _is_attention(module) and not hasattr(module, "ssmax"):
        module.ssmax = _made(module, implementation)


def _is_attention(module: nn.Module) -> bool:
    """Tells if a layer calls attention through AttentionInterface."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def _made(module: nn.Module, name: str) -> SSMax:
    for owner, attribute in ((module, "num_heads"), (module, "num_attention_heads"), (module.config, "num_attention_heads")):
        if isinstance(heads := getattr(owner, attribute, None), int):
            return SSMax(heads, **_trained[name])
    raise ValueError(f"ssmax: {type(module).__name__} has no num_heads, so the extent of s is not known")
