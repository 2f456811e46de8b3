"""Replaces the attention of TabICL 2, which uses scalable softmax, by this library.

    >>> import ssmax_torch.tabicl
    >>> ssmax_torch.tabicl.patch(classifier.model_)  # of a fitted TabICLClassifier or TabICLRegressor

All attention of the model (columns, rows, in-context learning) is then `ssmax_torch.attention`. It reads queries, keys
and values where the projection wrote them, and rotates rows inside the call. A multiplier of whole heads becomes the
library's c. The inducing points, which all columns share, become one set of queries with stride 0. Parameters keep
their names, so checkpoints and training work as before.
"""

from __future__ import annotations

import math

import torch
from tabicl._model.kv_cache import KVCacheEntry
from tabicl._model.layers import InducedSelfAttentionBlock, MultiheadAttention
from tabicl._model.ssmax import SSMax, SSMaxMLP
from torch import Tensor, nn
from torch.nn import functional as F

from . import Rope, attention, scaling
from .mask import Mask, as_mask


def patch(model: nn.Module) -> nn.Module:
    """Replaces every attention of `model`, in place, by this library. Returns the model."""
    if not any(isinstance(module, MultiheadAttention) for module in model.modules()):
        raise ValueError(f"model is a {type(model).__name__} and has no attention of TabICL")
    for module in model.modules():
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
    return model


class Attention(MultiheadAttention):
    """TabICL's multi-head attention by this library, with the original's members and arguments."""

    def forward(
        self,
        query,
        key=None,
        value=None,
        cached_kv=None,
        key_padding_mask=None,
        attn_mask=None,
        rope=None,
        need_kv=False,
    ):
        if cached_kv is None:
            q, k, v = self._project(query, key, value)
        else:  # the cache contains rotated keys
            q = self._heads(query, slice(0, self.embed_dim))
            k, v = cached_kv.key.flatten(0, -4), cached_kv.value.flatten(0, -4)
        queries, keys = q.shape[2], k.shape[2]
        # The library rotates queries and keys. Exception: the keys are rotated already, or the caller needs rotated keys.
        turns = rope is not None and cached_kv is None and not need_kv and queries <= keys
        table = _table(rope) if turns and _scales_heads(self.ssmax_layer) else None
        if table is not None and queries < keys:
            q = q @ _turned_back(table, keys - queries).to(q)
        elif rope is not None and table is None:
            q = rope.rotate_queries_or_keys(q)
            k = k if cached_kv is not None else rope.rotate_queries_or_keys(k)
        batch = cached_kv.key.shape[:-3] if cached_kv is not None else key.shape[:-2]
        kept = tuple(x.unflatten(0, batch) for x in (k, v)) if need_kv else ()

        c = None
        if self.ssmax_layer is not None and _scales_heads(self.ssmax_layer):
            c = _scaling(self.ssmax_layer, q, keys)
        elif self.ssmax_layer is not None:
            q = self.ssmax_layer(q, keys)
        mask = _mask(attn_mask, key_padding_mask, (*batch, self.num_heads, queries, keys))
        dropout_p = self.dropout if self.training else 0.0
        q = q.to(k.dtype).expand(k.shape[0], -1, -1, -1)
        out = attention(q, k, v, scaling=c, mask=mask, rope=table, dropout_p=dropout_p)
        out = self.out_proj(out.transpose(1, 2).reshape(*batch, queries, self.embed_dim))
        return (out, *kept) if kept and cached_kv is None else out

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [batch, heads, sequence, width], by one product per different input."""
        width = self.embed_dim
        if key is not value:
            return tuple(self._heads(x, slice(i * width, (i + 1) * width)) for i, x in enumerate((query, key, value)))
        if query is key:
            return self._heads(query, slice(0, 3 * width)).chunk(3, dim=1)
        return self._heads(query, slice(0, width)), *self._heads(key, slice(width, 3 * width)).chunk(2, dim=1)

    def _heads(self, x: Tensor, rows: slice) -> Tensor:
        """Returns [batch, heads, sequence, width] of the input projection's rows: a view of the product."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        projected = F.linear(x, self.in_proj_weight[rows], bias).flatten(0, -3)
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class InducedBlock(InducedSelfAttentionBlock):
    """TabICL's block of columns. All columns have the same inducing points, so the block projects and scales them once."""

    def induced_attention(self, src, train_size=None):
        return self.multihead_attn2(src, *2 * (self._hidden(src[..., :train_size, :]),))

    def induced_attention_with_cache(
        self, src, col_cache, block_idx, train_size=None, use_cache=False, store_cache=True
    ):
        if use_cache:
            return super().induced_attention_with_cache(src, col_cache, block_idx, train_size, True, False)
        hidden = self._hidden(src[..., :train_size, :])
        out, key, value = self.multihead_attn2(src, hidden, hidden, need_kv=True)
        col_cache.kv[block_idx] = KVCacheEntry(key=key, value=value)
        return out

    def _hidden(self, seen: Tensor) -> Tensor:
        one_for_all = self.ind_vectors[(None,) * (seen.dim() - 2)]
        return self.multihead_attn1(one_for_all, seen, seen)


_OURS = {MultiheadAttention: Attention, InducedSelfAttentionBlock: InducedBlock}


def _table(rope: nn.Module) -> Rope | None:
    """Returns a rope that rotates as TabICL's does. Returns None if the frequencies are not powers of one number."""
    frequencies = rope.freqs.detach().double()
    width = 2 * len(frequencies)
    theta = float(frequencies[-1]) ** (-width / (width - 2)) if width > 2 else 1.0
    powers = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if rope.learned_freq or rope.interpolate_factor != 1 or not torch.allclose(frequencies, powers, rtol=1e-6):
        return None
    return Rope(width, theta, "interleaved" if rope.interleaved else "half_split")


def _turned_back(table: Rope, positions: int) -> Tensor:
    """Returns the matrix that rotates queries back by `positions`. If there are fewer queries than keys, TabICL places
    queries at the first keys, and the library places queries at the last keys."""
    pairs = table.width // 2
    angle = positions * table.theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    a, b = (
        torch.arange(table.width).view(pairs, 2).unbind(1)
        if table.pairing == "interleaved"
        else torch.arange(table.width).view(2, pairs)
    )
    matrix = torch.zeros(table.width, table.width, dtype=torch.float64)
    matrix[a, a] = matrix[b, b] = angle.cos()
    matrix[a, b], matrix[b, a] = -angle.sin(), angle.sin()
    return matrix


def _scales_heads(layer: nn.Module | None) -> bool:
    """Returns true if all channels and queries of a head have the same multiplier, which may then follow the rope."""
    return layer is None or isinstance(layer, SSMax) or (isinstance(layer, SSMaxMLP) and not layer.elementwise)


def _scaling(layer: SSMax | SSMaxMLP, q: Tensor, keys: int) -> scaling.SSMax:
    """Returns the multiplier of each head. TabICL's n counts all keys, also masked keys."""
    logarithm = math.log(max(keys, 1))
    c = layer.scales * logarithm if isinstance(layer, SSMax) else layer.mlp(q.new_tensor([logarithm]))
    return scaling.SSMax(0.0, c)


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, ...]) -> Mask | None:
    """Returns both masks as one. shape is [..., heads, queries, keys]. True masks a key, numbers are added to the logit."""
    mask = None
    if key_padding_mask is not None:
        mask = as_mask(_shown(key_padding_mask).reshape(-1, 1, 1, shape[-1]))
    if attn_mask is not None:
        attn_mask = as_mask(_shown(attn_mask).expand(shape).flatten(0, -4))
        mask = attn_mask if mask is None else mask & attn_mask
    return mask


def _shown(hidden: Tensor) -> Tensor:
    return ~hidden if hidden.dtype == torch.bool else hidden
