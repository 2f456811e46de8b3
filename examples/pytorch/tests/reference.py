"""The reference of the tests: attention in plain, differentiable PyTorch, with every logit stored."""

import torch


def visible(batch, heads, queries, keys, *, causal=False, window=None, prefix=None, lengths=None, matrix=None, chunk=None, top_left=False, padding=None):
    """Returns the mask [batch, heads, queries, keys]. The last query has the position of the last key. With top_left,
    query i has the position i."""
    position = torch.arange(queries)[:, None] + (0 if top_left else keys - queries)
    key = torch.arange(keys)
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if causal or top_left:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (key >= position - window[0]) & (key <= position + window[1])
    if padding is not None:
        seen = seen & (key <= position) & (key >= torch.as_tensor(padding)[:, None, None, None])
    if chunk is not None:
        seen = seen & (key <= position) & (key >= position - position % chunk)
    if prefix is not None:
        ends = torch.as_tensor(prefix)[:, None, None, None]
        seen = seen & ((key <= position) | (key < ends))
    if lengths is not None:
        seen = seen & (key < torch.as_tensor(lengths)[:, None, None, None])
    return seen if matrix is None else seen & matrix


def attention(
    q, k, v, seen, c, *, softcap=None, slopes=None, absolute=False, bias=None, tau=None, sinks=None, scaled_sinks=False,
    top_left=False, padding=None,
):  # fmt: skip
    """Returns out and lse. c(n, p) returns the multipliers [batch, heads, queries] for n and the query's own position.
    Positions begin after the padding of each batch entry."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    z = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    positions = torch.arange(queries) + (0 if top_left else keys - queries)
    distance = torch.arange(keys) - positions[:, None]
    if padding is not None:
        positions = positions - torch.as_tensor(padding)[:, None, None]
    if slopes is not None:
        z = z + slopes[:, None, None] * (-distance.abs() if absolute else distance)
    if tau is not None:
        a = (1 + 2 * torch.log1p(distance.abs().double() / tau)).sqrt()
        z = a * z + 1 - a**2
    if bias is not None:
        z = z + bias
    n = seen.sum(-1)
    position = positions.clamp(min=0).double().expand(n.shape)
    multiplier = c(n.clamp(min=1).double(), position)[..., None]
    z = z * multiplier
    z = torch.where(seen, z, -torch.inf)
    if sinks is not None:
        sink = sinks[None, :, None, None] * (multiplier if scaled_sinks else 1)
        z = torch.cat([z, sink.expand(*z.shape[:3], 1)], -1)
    lse = z.logsumexp(-1)
    p = torch.exp(z - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return p[..., :keys] @ v, lse
