"""Replaces torch.nn.MultiheadAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._attention import attention
from ._modules import SSMax
from .mask import Causal, CausalTopLeft, Mask, MatrixMask
from .scaling import Scaling

_NAME = "ssmax_torch.MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` by this library: the same constructor, parameters, masks and results.

    ``scaling`` is a ``Scaling`` or the module ``ssmax_torch.SSMax(num_heads)``, whose s and b then are parameters
    ``scaling.s`` and ``scaling.b`` of this module. Without them, a state_dict of nn.MultiheadAttention loads unchanged.

    Differences:

    - ``forward`` returns None in place of weights. ``need_weights`` is False by default; True is an error.
    - A query that sees no key has attention 0, so its output is the bias of ``out_proj``.
    - ``is_causal`` without ``attn_mask`` is allowed. Both align the first query with the first key.
    - n counts the keys that the masks show, and the keys of ``add_bias_kv`` and ``add_zero_attn``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
        *,
        scaling: Scaling | SSMax | None = None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if not isinstance(scaling, (Scaling, SSMax, type(None))):
            raise TypeError(f"{_NAME}: scaling is a {type(scaling).__name__}, must be a Scaling, an SSMax or None")
        self.scaling = scaling

    def _reset_parameters(self):
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # nn.TransformerEncoderLayer calls its own attention in place of this module where this is true.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Returns the output, and None in place of the weights. The arguments are those of nn.MultiheadAttention."""
        if need_weights:
            raise ValueError(f"{_NAME}: need_weights is True, must be False: the weights are never stored")
        batched = query.dim() == 3
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim():
                raise ValueError(f"{_NAME}: {name} has {tensor.dim()} dimensions, must have 3, or 2 as the others")
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = q[None], k[None], v[None]
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(batch, -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(batch, -1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = self._mask(attn_mask, key_padding_mask, is_causal, batch, queries, keys, k.shape[1] - keys, q.device)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        scaling = self.scaling.scaling() if isinstance(self.scaling, SSMax) else self.scaling
        dropout_p = self.dropout if self.training else 0.0
        out = attention(q, k, v, scaling=scaling, mask=mask, dropout_p=dropout_p).transpose(1, 2).flatten(2)
        out = out if self.batch_first or not batched else out.transpose(0, 1)
        return self.out_proj(out if batched else out[0]), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Returns the products with the input weights, by one product for equal inputs."""
        width = self.embed_dim
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        elif key is value:
            bias = None if self.in_proj_bias is None else self.in_proj_bias[width:]
            both = F.linear(key, self.in_proj_weight[width:], bias).chunk(2, -1)
            return F.linear(query, self.in_proj_weight[:width], biases[0]), *both
        else:
            weights = self.in_proj_weight.chunk(3)
        return tuple(F.linear(*x) for x in zip((query, key, value), weights, biases, strict=True))

    def _mask(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        batch: int,
        queries: int,
        keys: int,
        added: int,
        device: torch.device,
    ) -> Mask | None:
        """Returns both masks as one. True masks a key, as in nn.MultiheadAttention. The `added` keys are visible."""
        mask = None
        if is_causal and queries == keys and added == 0:
            mask, attn_mask = Causal(), None  # is_causal states that attn_mask is the causal mask
        elif is_causal and attn_mask is None and added == 0:
            mask = CausalTopLeft()
        elif is_causal and attn_mask is None:
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)
        if attn_mask is not None:
            shape, one, each = list(attn_mask.shape), [queries, keys], [batch * self.num_heads, queries, keys]
            if shape not in (one, each):
                raise ValueError(f"{_NAME}: attn_mask has shape {shape}, must be {one} or {each}")
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
            mask = _shown("attn_mask", attn_mask, added)
        if key_padding_mask is not None:
            shape = list(key_padding_mask.shape)
            if shape != [batch, keys] and (batch != 1 or shape != [keys]):
                raise ValueError(f"{_NAME}: key_padding_mask has shape {shape}, must be {[batch, keys]}")
            padding = _shown("key_padding_mask", key_padding_mask.reshape(batch, 1, 1, keys), added)
            mask = padding if mask is None else mask & padding
        return mask


def _shown(name: str, masked: Tensor, added: int) -> MatrixMask:
    if masked.dtype != torch.bool and not masked.is_floating_point():
        raise ValueError(f"{_NAME}: {name} has dtype {masked.dtype}, must be bool or of floating type")
    shown = ~masked if masked.dtype == torch.bool else masked
    return MatrixMask(F.pad(shown, (0, added), value=shown.dtype == torch.bool) if added else shown)
