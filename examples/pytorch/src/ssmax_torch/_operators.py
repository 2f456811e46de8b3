"""The operators of the compiled library: their shapes and types for torch.compile, and their derivatives."""

from pathlib import Path

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ._checks import check_broadcast, check_entries, check_inputs, check_parameters, matrices

torch.ops.load_library(Path(__file__).with_name("operators.so"))

_attention = torch.ops.ssmax.attention.default
_attention_forward = torch.ops.ssmax.attention_forward.default
_attention_statistics = torch.ops.ssmax.attention_statistics.default
_count_within_gaps = torch.ops.ssmax.count_within_gaps.default
_attention_backward = torch.ops.ssmax.attention_backward.default

# The same without OpOverload.__call__, which takes 0.3 us. torch.compile needs the OpOverload.
_run_attention_forward = _attention_forward._op
# Number of arguments of attention_forward without with_lse: query, key, value and the common arguments.
_COMMON = len(_attention_forward._schema.arguments) - 1

# Functions of every call. A name of this module saves a small call the look-ups in other modules.
_any_requires_grad = torch._C._any_requires_grad
_autocast_enabled = torch.is_autocast_enabled
_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled

# Name and default of each argument of ssmax::attention after query, key and value.
_DEFAULTS = {argument.name: argument.default_value for argument in _attention._schema.arguments[3:]}
_SCALARS = list(_DEFAULTS).index("s")  # the first arguments, which are no tensors
# Places (from 0) of the arguments with a gradient, in the order of attention_backward's results.
_LEARNT = {name: 3 + list(_DEFAULTS).index(name) for name in ("s", "b", "p", "c", "slopes", "bias", "sinks")}
_STORED = (torch.float32, torch.float16, torch.bfloat16)  # types of a cache


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which tensors of `dtype` are computed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_like(like: Tensor, shape: tuple) -> Tensor:
    """Returns an empty tensor. As new_tensor_like in csrc/tensors.cpp, heads are the inner dimension if they are in `like`."""
    batch, heads, positions, width = shape
    if like.stride(1) >= like.stride(2):
        return like.new_empty(shape)
    return like.new_empty((batch, positions, heads, width)).transpose(1, 2)


def _named(arguments: tuple) -> dict:
    """Returns the arguments after query, key and value by name. Missing arguments have their defaults."""
    return _DEFAULTS | dict(zip(_DEFAULTS, arguments))


def _check(query: Tensor, key: Tensor, value: Tensor, *arguments: object) -> None:
    """Throws the errors of ssmax::attention for shapes and types."""
    check_inputs(query, key, value)
    given = _named(arguments)
    check_parameters(query, given["s"], given["b"], given["slopes"], given["sinks"])
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    check_broadcast("c", given["c"], batch, heads, queries)
    for name, tensor, modulo in (
        ("mask", given["visible"], given["visible_modulo"]),
        ("bias", given["bias"], given["bias_modulo"]),
    ):
        check_broadcast(name, tensor, batch, matrices(name, tensor, heads) if modulo else heads, queries, keys)
    check_entries("padding", given["left_padding"], batch)
    for name in ("prefix", "lengths"):
        check_entries(name, given[name], batch)


@torch.library.register_fake("ssmax::attention")
def _fake_attention(query, key, value, *arguments):
    _check(query, key, value, *arguments)
    out = _empty_like(query, (*query.shape[:3], value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=compute_type(query.dtype))


@torch.library.register_fake("ssmax::attention_forward")
def _(with_lse, *inputs):
    out, lse = _fake_attention(*inputs)
    return out, lse if with_lse else None


@torch.library.register_fake("ssmax::attention_statistics")
def _(*inputs):
    out, lse = _fake_attention(*inputs)
    return out, lse, *(torch.empty_like(lse) for _ in range(4))


@torch.library.register_fake("ssmax::count_within_gaps")
def _(query, key, gaps, *arguments):
    _check(query, key, key, *arguments)
    largest = query.new_empty(query.shape[:3], dtype=compute_type(query.dtype))
    return largest, largest.new_empty((len(gaps), *largest.shape))


@torch.library.register_fake("ssmax::attention_backward")
def _(grad_out, grad_lse, query, key, value, out, lse, learn, *arguments):
    _check(query, key, value, *arguments)
    heads, compute = query.shape[1], compute_type(query.dtype)
    given = _named(arguments)

    def sums(name, wanted):
        shape = (0,)
        if wanted and name in ("s", "b"):
            shape = (heads,)
        elif wanted and given[name] is not None:
            shape = (heads,) if name in ("slopes", "sinks") else given[name].shape
        return query.new_empty(shape, dtype=compute if name in ("c", "bias", "sinks") else torch.float64)

    return (
        *(_empty_like(tensor, tensor.shape) for tensor in (query, key, value)),
        *(sums(name, wanted) for name, wanted in zip(_LEARNT, learn, strict=True)),
    )


@torch.library.register_fake("ssmax::decode")
def _fake_decode(query, keys, values, *arguments):
    check_inputs(query, keys, values, storage=(torch.float64,) if query.dtype == torch.float64 else _STORED)
    out = _empty_like(query, (*query.shape[:3], values.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=compute_type(query.dtype))


@torch.library.register_fake("ssmax::decode_statistics")
def _(*inputs):
    out, lse = _fake_decode(*inputs)
    return out, lse, *(torch.empty_like(lse) for _ in range(4))


@torch.library.register_fake("ssmax::rotate")
def _(rows, rope, start, rope_positions=None, rope_axes=None):
    return _empty_like(rows, rows.shape)


@register_flop_formula([torch.ops.ssmax.attention, torch.ops.ssmax.attention_statistics])
def _attention_flop(query_shape, key_shape, value_shape, *arguments, out_shape=None, **_) -> int:
    """Returns the FLOP of two products. As in PyTorch's own attention, masked keys count."""
    batch, heads, queries, width = query_shape
    return 2 * batch * heads * queries * key_shape[2] * (width + value_shape[3])


@register_flop_formula(torch.ops.ssmax.attention_forward)
def _(with_lse, *shapes, out_shape=None, **_) -> int:
    return _attention_flop(*shapes)


@register_flop_formula(torch.ops.ssmax.count_within_gaps)
def _(query_shape, key_shape, gaps, *arguments, out_shape=None, **_) -> int:
    """Returns the FLOP of the logits, which are computed once for the largest and once per gap."""
    batch, heads, queries, width = query_shape
    return 2 * (1 + len(gaps)) * batch * heads * queries * key_shape[2] * width


@register_flop_formula(torch.ops.ssmax.attention_backward)
def _(grad_out_shape, grad_lse_shape, query_shape, key_shape, value_shape, *arguments, out_shape=None, **_) -> int:
    """Returns the FLOP of five products, one of which is the logits. As in PyTorch's own attention, masked keys count."""
    batch, heads, queries, width = query_shape
    return 2 * batch * heads * queries * key_shape[2] * (3 * width + 2 * value_shape[3])


@register_flop_formula([torch.ops.ssmax.decode, torch.ops.ssmax.decode_statistics], get_raw=True)
def _(query, keys, values, lengths, *arguments, out_val=None, **_) -> int:
    """Returns the FLOP of two products with the stored keys of each sequence."""
    _, heads, queries, width = query.shape
    stored = lengths.clamp(max=keys.shape[2]).sum().item()
    return 2 * heads * queries * stored * (width + values.shape[3])


def _save(ctx, inputs: tuple, output: tuple) -> None:
    """Saves what _gradients needs."""
    arguments, tensors = inputs[3:], ()
    if len(arguments) > _SCALARS:
        tensors = [x if isinstance(x, Tensor) else None for x in arguments]
        arguments = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.arguments = arguments
    ctx.save_for_backward(*output, *inputs[:3], *tensors)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    _save(ctx, inputs, output)


def _gradients(ctx, wanted, grad_out, grad_lse):
    """Returns the gradients of the inputs for which `wanted` is true, None for the others."""
    out, lse, query, key, value, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            arguments[i] = tensor
    inputs = [query, key, value, *arguments]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    elif grad_out.stride(3) != 1:  # for example the gradient of a sum: one number, expanded
        grad_out = grad_out.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    learn = [i < len(wanted) and wanted[i] for i in _LEARNT.values()]
    gradients = _call_backward(grad_out, grad_lse, *inputs[:3], out, lse, learn, *inputs[3:])
    result = [None] * len(inputs)
    for i in range(3):
        if wanted[i]:
            result[i] = gradients[i]
    for i, gradient, learns in zip(_LEARNT.values(), gradients[3:], learn, strict=True):
        if learns:
            parameter = inputs[i]
            whole = gradient.sum() if parameter.dim() == 0 else gradient.reshape(parameter.shape)
            result[i] = whole.to(parameter.dtype)
    return tuple(result)


def _backward(ctx, grad_out, grad_lse):
    return _gradients(ctx, ctx.needs_input_grad, grad_out, grad_lse)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError("ssmax_torch.attention: the second derivative is not implemented")


def _no_forward_mode(ctx, *tangents):
    raise NotImplementedError("ssmax_torch.attention: forward-mode derivatives are not implemented, use reverse mode")


class _Attention(torch.autograd.Function):
    """The autograd function of attention in graphs and under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return _attention(*inputs)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    jvp = staticmethod(_no_forward_mode)


class _AttentionStatistics(torch.autograd.Function):
    """The autograd function of attention with statistics, which have no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return _attention_statistics(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup_context(ctx, inputs, output[:2])
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *grad_statistics):
        return _backward(ctx, grad_out, grad_lse)

    jvp = staticmethod(_no_forward_mode)


def _evaluate(with_lse: bool, *inputs: object) -> tuple[Tensor, Tensor | None]:
    """Computes out and lse without a graph. lse may be None unless `with_lse`."""
    if len(inputs) <= _COMMON:
        return _run_attention_forward(with_lse, *inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return _attention(*inputs)


class _Recorded(torch.autograd.Function):
    """The autograd function of all other calls. Its forward receives the context, and returns lse only if the caller
    needs lse. Both take less time."""

    @staticmethod
    def forward(ctx, with_lse, *inputs):
        output = _evaluate(True, *inputs)
        _save(ctx, inputs, output)
        if not with_lse:
            return output[0]
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        return None, *_gradients(ctx, ctx.needs_input_grad[1:], grad_out, grad_lse)

    jvp = staticmethod(_no_forward_mode)


# _Recorded.apply without the preparations for torch.func, which take 1.7 us.
_record = super(torch.autograd.Function, _Recorded).apply


class _AttentionBackward(torch.autograd.Function):
    """The autograd function of the backward, for calls that record a graph of the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return _attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_mode)


_record_attention = super(torch.autograd.Function, _Attention).apply
_record_statistics = super(torch.autograd.Function, _AttentionStatistics).apply
_record_backward = super(torch.autograd.Function, _AttentionBackward).apply


def _register_autograd(name: str, function, record) -> None:
    """Registers `record` for graphs. Unlike torch.library.register_autograd, it works under torch.func's transforms."""

    def autograd(keyset, *inputs):
        if _transformed():
            with enable_single_level_autograd_function():
                return record(*inputs)
        if _grad_enabled() and _any_requires_grad(*inputs):
            return record(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return function(*inputs)

    _library.impl(name, autograd, "Autograd", with_keyset=True)


def _transformed() -> bool:
    """Returns true if a transform of torch.func or forward-mode differentiation is active."""
    return _functorch_active() or forward_ad._current_level >= 0


_library = torch.library.Library("ssmax", "FRAGMENT")
_register_autograd("attention", _attention, _record_attention)
_register_autograd("attention_statistics", _attention_statistics, _record_statistics)
_register_autograd("attention_backward", _attention_backward, _record_backward)


def differentiates(inputs: tuple) -> bool:
    """Returns true if a derivative of a result is wanted with respect to one of the tensors in `inputs`."""
    if _grad_enabled() and _any_requires_grad(*inputs):
        return True
    return forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    )


def _call_backward(*inputs):
    if _grad_enabled() or _transformed():
        return _AttentionBackward.apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return _attention_backward(*inputs)


def _autocast(tensor: Tensor) -> Tensor:
    """Returns the tensor in autocast's type. Exception: float64 is not converted."""
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _wants_gradient(inputs: tuple) -> bool:
    """Returns true if a gradient of one of the inputs is wanted. torch.compile can trace this function."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def call_attention(with_lse: bool, *inputs: object) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of checked tensors and the operators' arguments. Returns out and, if `with_lse`, lse."""
    if _autocast_enabled("cpu"):
        inputs = *(_autocast(tensor) for tensor in inputs[:3]), *inputs[3:]
    if _compiling():
        plain = len(inputs) <= _COMMON and not _wants_gradient(inputs) and not _transformed()
        output = _attention_forward(with_lse, *inputs) if plain else _attention(*inputs)
    elif _transformed():
        output = _Attention.apply(*inputs)
    elif _grad_enabled() and _any_requires_grad(*inputs):
        return _record(with_lse, *inputs)
    elif len(inputs) <= _COMMON:  # without the time that _evaluate takes
        output = _run_attention_forward(with_lse, *inputs)
    else:
        output = _evaluate(with_lse, *inputs)
    return output if with_lse else output[0]


def call_attention_statistics(*inputs: object) -> tuple[Tensor, ...]:
    """Computes attention of checked tensors. Returns out, lse and four statistics: see ssmax::RowStatistics."""
    if _autocast_enabled("cpu"):
        inputs = *(_autocast(tensor) for tensor in inputs[:3]), *inputs[3:]
    return _attention_statistics(*inputs)


def call_count_within_gaps(query: Tensor, key: Tensor, *inputs: object) -> tuple[Tensor, Tensor]:
    """Counts keys of checked tensors. Returns the largest logits and the counts, which have no gradient."""
    if _autocast_enabled("cpu"):
        query, key = _autocast(query), _autocast(key)
    return _count_within_gaps(query.detach(), key.detach(), *inputs)
