"""The reference of the tests: attention in plain, differentiable PyTorch, with every logit stored."""

import torch


def visible(batch, heads, queries, keys, *, causal=False, window=None, prefix=None, lengths=None, matrix=None):
    """Returns the mask [batch, heads, queries, keys]. The last query stands at the last key."""
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if causal:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (key >= position - window[0]) & (key <= position + window[1])
    if prefix is not None:
        ends = torch.as_tensor(prefix)[:, None, None, None]
        seen = seen & ((key <= position) | (key < ends))
    if lengths is not None:
        seen = seen & (key < torch.as_tensor(lengths)[:, None, None, None])
    return seen if matrix is None else seen & matrix


def attention(q, k, v, seen, c, *, softcap=None, slopes=None, bias=None, tau=None, sinks=None, scaled_sinks=False):
    """Returns out and lse. c(n, p) returns the multipliers [batch, heads, queries] for n and the query's own position."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    z = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    distance = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
    if slopes is not None:
        z = z + slopes[:, None, None] * distance
    if tau is not None:
        a = (1 + 2 * torch.log1p(distance.abs().double() / tau)).sqrt()
        z = a * z + 1 - a**2
    if bias is not None:
        z = z + bias
    n = seen.sum(-1)
    position = (torch.arange(queries) + keys - queries).clamp(min=0).double().expand(n.shape)
    multiplier = c(n.clamp(min=1).double(), position)[..., None]
    z = z * multiplier
    z = torch.where(seen, z, -torch.inf)
    if sinks is not None:
        sink = sinks[None, :, None, None] * (multiplier if scaled_sinks else 1)
        z = torch.cat([z, sink.expand(*z.shape[:3], 1)], -1)
    lse = z.logsumexp(-1)
    p = torch.exp(z - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return p[..., :keys] @ v, lse
