"""Checks of arguments that must be numbers."""

from torch import Tensor
from torch.autograd import forward_ad


def number(name: str, value: float | Tensor) -> float:
    """Returns the number. Throws if it is a tensor whose derivative would be lost."""
    if isinstance(value, Tensor) and (value.requires_grad or forward_ad._current_level >= 0):
        raise ValueError(f"ssmax_torch.attention: {name} is a tensor with a derivative, must be a number")
    return float(value)
