"""Counts of keys within gaps of the largest logit, compared to counts in float64."""

import pytest
import reference
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from ssmax_torch import GapCounts, attention, count_within_gaps, mask, score
from ssmax_torch._arguments import arguments

GAPS = [0.0, 0.5, 2.0, torch.inf]


def inputs(dtype=torch.float64, queries=21, keys=40, width=16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, width), (2, 2, keys, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def logits(q, k, seen, cap=None):
    q, k = (x.detach().double() for x in (q, k))
    z = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[3] ** 0.5
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    return z.masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("dtype, slack", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
@pytest.mark.parametrize("queries", [1, 21])
def test_counts(dtype, slack, queries):
    """Each count is between the counts in float64 of gaps that are smaller and larger by the error of a logit."""
    q, k = inputs(dtype, queries)
    result = count_within_gaps(q, k, GAPS, mask=mask.Causal(), score=score.Softcap(3.0))
    assert isinstance(result, GapCounts)
    largest, counts = result
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    assert largest.dtype == counts.dtype == compute and not counts.requires_grad and not largest.requires_grad
    assert largest.shape == (2, 4, queries) and counts.shape == (len(GAPS), 2, 4, queries)
    seen = reference.visible(2, 4, queries, 40, causal=True)
    z = logits(q, k, seen, 3.0)
    torch.testing.assert_close(largest.double(), z.amax(-1), atol=slack, rtol=slack)
    for gap, mine in zip(GAPS, counts.double(), strict=True):
        least, most = ((seen & (z >= z.amax(-1, keepdim=True) - gap - sign * 2 * slack)).sum(-1) for sign in (-1, 1))
        assert (mine >= least.clamp(min=1)).all() and (mine <= most).all()
    assert torch.equal(counts[3].double(), seen.sum(-1).double()) and (counts[1] < counts[2]).any()


def test_largest_is_that_of_attention_and_no_key_counts_0():
    q, k = inputs()
    seen = torch.rand(21, 40, generator=torch.Generator().manual_seed(1)) < 0.3
    seen[5] = False
    softcap = score.Softcap(3.0)
    largest, counts = count_within_gaps(q, k, GAPS, mask=seen, score=softcap)
    statistics = attention(q, k, k, mask=seen, score=softcap, return_statistics=True)[1]
    torch.testing.assert_close(largest, statistics.largest, rtol=1e-15, atol=0)
    assert (largest[:, :, 5] == -torch.inf).all() and (counts[:, :, :, 5] == 0).all()
    assert torch.equal(counts[3].long(), seen.sum(-1).expand(2, 4, -1))


def test_no_gaps_and_no_keys():
    q, k = inputs()
    assert count_within_gaps(q, k, []).counts.shape == (0, 2, 4, 21)
    largest, counts = count_within_gaps(q, k[:, :, :0], [1.0])
    assert (largest == -torch.inf).all() and (counts == 0).all()


def test_errors():
    q, k = inputs()
    for gap in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="ssmax_torch.count_within_gaps: gaps"):
            count_within_gaps(q, k, [0.5, gap])
    with pytest.raises(ValueError, match="key has shape"):
        count_within_gaps(q, k[..., :8], [0.5])
    with pytest.raises(ValueError, match="dtype"):
        count_within_gaps(q, k.float(), [0.5])


@pytest.mark.parametrize("options", [{}, dict(mask=mask.Causal(), score=score.Softcap(3.0))])
def test_opcheck(options):
    what = dict.fromkeys(["scaling", "mask", "score", "sinks", "rope", "scale"]) | dict(scaled_sinks=False) | options
    q, k = (x.detach() for x in inputs(torch.float32))
    opcheck(torch.ops.ssmax.count_within_gaps.default, (q, k, GAPS, *arguments(q, **what)))


def test_vmap_and_flop():
    q, k = (x.detach() for x in inputs())
    stacked = torch.func.vmap(lambda q: tuple(count_within_gaps(q, k, GAPS)))(torch.stack([q, 2 * q]))
    for i, one in enumerate((q, 2 * q)):
        for mine, other in zip(stacked, count_within_gaps(one, k, GAPS), strict=True):
            assert torch.equal(mine[i], other)
    with FlopCounterMode(display=False) as counter:
        count_within_gaps(q, k, GAPS)
    assert counter.get_total_flops() == 5 * 2 * 2 * 4 * 21 * 40 * 16


def test_compile_autocast_and_meta():
    q, k = inputs(torch.float32)
    compiled = torch.compile(lambda q, k: count_within_gaps(q, k, GAPS).counts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k), count_within_gaps(q, k, GAPS).counts)
    with torch.autocast("cpu", torch.bfloat16):
        largest = count_within_gaps(q, k, GAPS).largest
    assert torch.equal(largest, count_within_gaps(q.bfloat16(), k.bfloat16(), GAPS).largest)
    largest, counts = count_within_gaps(q.to("meta"), k.to("meta"), GAPS)
    assert largest.shape == (2, 4, 21) and counts.shape == (4, 2, 4, 21)
