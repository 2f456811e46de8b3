"""Checks of arguments that must be numbers, and the text of arguments."""

from torch import Tensor
from torch.autograd import forward_ad


def number(name: str, value: float | Tensor, function: str = "attention") -> float:
    """Returns the number. Throws if it is a tensor whose derivative would be lost."""
    check_no_derivative(name, value, ", must be a number", function)
    return float(value)


def check_no_derivative(name: str, value: object, requirement: str = "", function: str = "attention") -> None:
    """Throws if the value is a tensor whose derivative would be lost."""
    if isinstance(value, Tensor) and (value.requires_grad or forward_ad._current_level >= 0):
        raise ValueError(f"ssmax_torch.{function}: {name} is a tensor with a derivative{requirement}")


def shown(value: object) -> str:
    """Returns the text of an argument. A tensor is shown by its shape and type."""
    if isinstance(value, Tensor):
        return f"Tensor({list(value.shape)}, {str(value.dtype).removeprefix('torch.')})"
    return repr(value)


def call_text(kind: type, arguments: dict[str, object]) -> str:
    """Returns the call of a constructor: Softcap(cap=30.0)."""
    return f"{kind.__name__}({', '.join(f'{name}={shown(value)}' for name, value in arguments.items())})"
