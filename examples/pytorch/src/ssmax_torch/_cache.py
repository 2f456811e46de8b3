"""A cache of keys and values, and attention of new queries against the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import arguments, check_tensors
from ._attention import RowStatistics, results
from ._operators import compute_type, differentiates
from ._rope import Rope
from .mask import Causal, Mask, as_mask
from .scaling import Scaling
from .score import Score


def _check_no_derivative(function: str, *inputs: object) -> None:
    """Throws if a derivative of a tensor would be lost."""
    if differentiates(inputs):
        raise NotImplementedError(
            f"ssmax_torch.KVCache.{function}: derivatives are not implemented, call it under torch.no_grad()"
        )


class KVCache:
    """The keys and values of `batch` sequences. Each sequence has its own length.

    The constructor allocates batch · kv_heads · capacity · (width + value_width) elements of `dtype`: ``keys`` and
    ``values``, [batch, kv_heads, capacity, width]. With ``ring`` a sequence may grow beyond the capacity: the cache
    then forgets the oldest keys, which suits a sliding window. With ``rope`` the cache rotates keys before it stores
    them, and decode rotates queries. If the rope has positions, they include those of all tokens that the cache will
    get. The cache is not differentiable: tensors with a derivative raise ``NotImplementedError`` unless you call the
    cache under ``torch.no_grad()``.

    >>> cache = KVCache(1, 2, 64, capacity=4096)
    >>> cache.append(key, value)                     # [1, 2, new, 64]
    >>> out = cache.decode(query, scaling=scaling)   # [1, heads, new, 64]: the last `new` positions
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        width: int,
        *,
        capacity: int,
        value_width: int | None = None,
        dtype: torch.dtype = torch.float32,
        ring: bool = False,
        rope: Rope | None = None,
    ):
        if rope is not None and rope.key_position != 0:
            raise ValueError(f"rope has key_position {rope.key_position}, a cache begins at 0")
        self.keys = torch.zeros(batch, kv_heads, capacity, width, dtype=dtype)
        self.values = torch.zeros(batch, kv_heads, capacity, width if value_width is None else value_width, dtype=dtype)
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.ring = ring
        self.rope = rope

    def append(self, key: Tensor, value: Tensor, counts: Sequence[int] | None = None) -> None:
        """Appends key [batch, kv_heads, new, width] and value [batch, kv_heads, new, value_width]. With counts, appends
        only the first counts[b] positions to sequence b. Throws before any change if an argument does not fit."""
        _check_no_derivative("append", key, value)
        with torch.no_grad():
            self._append(key, value, counts)

    def _append(self, key: Tensor, value: Tensor, counts: Sequence[int] | None) -> None:
        for name, new, stored in (("key", key, self.keys), ("value", value, self.values)):
            expected = (*stored.shape[:2], key.shape[2] if key.dim() == 4 else -1, stored.shape[3])
            if tuple(new.shape) != expected:
                raise ValueError(f"{name} has shape {list(new.shape)}, must be {list(expected)}")
            if new.device != stored.device:
                raise ValueError(f"{name} is on {new.device}, the cache is on {stored.device}")
        batch, _, new, _ = key.shape
        added = [new] * batch if counts is None else [int(count) for count in counts]
        if len(added) != batch:
            raise ValueError(f"counts has {len(added)} numbers, sequences are {batch}")
        capacity = self.keys.shape[2]
        positions = None if self.rope is None else self.rope.positions_of(batch)
        for b, (length, count) in enumerate(zip(self.lengths.tolist(), added, strict=True)):
            if not 0 <= count <= new:
                raise ValueError(f"counts has {count} for sequence {b}, new positions are {new}")
            if length + count > capacity and not self.ring:
                raise ValueError(f"key would bring sequence {b} to length {length + count}, the capacity is {capacity}")
            if positions is not None and length + count > positions.shape[2]:
                raise ValueError(
                    f"key would bring sequence {b} to length {length + count}, rope has {positions.shape[2]} tokens"
                )
        for b, count in enumerate(added):
            length = int(self.lengths[b])
            rotated = key[b : b + 1, :, :count]
            if self.rope is not None and count > 0:
                wide = rotated.to(compute_type(rotated.dtype)).contiguous()
                rotated = self._rotated(wide, None if positions is None else positions[b % len(positions), None], length)
            # Skip the keys that a ring would overwrite within this call.
            first = max(0, count - capacity)
            while first < count:
                row = (length + first) % capacity
                fitting = min(count - first, capacity - row)
                self.keys[b, :, row : row + fitting] = rotated[0, :, first : first + fitting]
                self.values[b, :, row : row + fitting] = value[b, :, first : first + fitting]
                first += fitting
        self.lengths += torch.tensor(added, dtype=torch.int64)

    def _rotated(self, rows: Tensor, positions: Tensor | None, start: int) -> Tensor:
        """Returns rows [1, kv_heads, new, width] of one sequence, rotated as tokens from `start` on."""
        if positions is not None:
            positions, start = positions[:, :, start : start + rows.shape[2]].contiguous(), 0
        return torch.ops.ssmax.rotate(rows, self.rope.numbers(), start, positions, self.rope.axes_of_pairs())

    def decode(
        self,
        query: Tensor,
        *,
        scaling: Scaling | None = None,
        mask: Mask | None = None,
        score: Score | None = None,
        sinks: Tensor | None = None,
        scaled_sinks: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
        return_statistics: bool = False,
    ) -> Tensor | tuple[Tensor | RowStatistics, ...]:
        """Returns attention of query [batch, heads, new, width] at the last `new` positions of each sequence. Requires
        that the keys of these positions have been appended. n and positions come from the cache. The mask is
        ``Causal()`` by default. The other arguments are those of ``attention``."""
        mask = Causal() if mask is None else as_mask(mask)
        if mask.top_left:
            raise ValueError("ssmax_torch.KVCache.decode: mask has CausalTopLeft, must be aligned bottom-right")
        if mask.left_padding is not None:
            raise ValueError("ssmax_torch.KVCache.decode: mask has LeftPadding, the sequences of a cache have no padding")
        check_tensors(query, self.keys, self.values)
        operands = arguments(query, scaling, mask, score, sinks, scaled_sinks, self.rope, scale)
        _check_no_derivative("decode", query, *operands)
        decode = torch.ops.ssmax.decode_statistics if return_statistics else torch.ops.ssmax.decode
        with torch.no_grad():
            out, lse, *statistics = decode(query, self.keys, self.values, self.lengths, self.ring, *operands)
        return results(out, lse if return_lse else None, statistics)

    def clear(self) -> None:
        """Sets the length of every sequence to 0."""
        self.lengths.zero_()

    def truncate(self, batch: int, length: int) -> None:
        """Shortens one sequence to `length` positions, as after a rejected speculation."""
        held = int(self.lengths[batch])
        if not 0 <= length <= held:
            raise ValueError(f"length is {length}, must be within 0 and {held}")
        if length < held > self.keys.shape[2]:
            raise ValueError(f"length is {length}, but the ring has forgotten keys")
        self.lengths[batch] = length
