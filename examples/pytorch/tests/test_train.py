"""Runs a few steps of the training example."""

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm", reason="needs tqdm: pip install 'examples/pytorch[clients]'")
sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ssmax", [False, True])
def test_the_loss_falls(ssmax):
    model, losses = train.train(ssmax, steps=40, seed=1)
    assert losses[0] == pytest.approx(math.log(train.WORDS), rel=0.2)  # the loss of a guess
    assert sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.05
    scalings = [layer.attention.s for layer in model.layers] if ssmax else []
    assert all((s != 0.25).all() for s in scalings)  # training changed s


def test_the_task_can_be_solved_by_looking_back():
    for copies in (False, True):
        words, targets = train.draw_batch(3, 5, copies)
        assert words.shape == targets.shape == (3, 20)
        for sequence, wanted in zip(words.tolist(), targets.tolist()):
            known = [i for i, target in enumerate(wanted) if target != train.IGNORED]
            assert known == (list(range(10, 19)) if copies else list(range(10, 20, 2)))
            for i in known:  # the word after the last occurrence
                assert wanted[i] == sequence[sequence.index(sequence[i]) + 1]


@pytest.mark.parametrize("ssmax", [False, True])
@torch.no_grad()
def test_attention_on_the_needle_is_the_weight_of_its_key(ssmax):
    torch.manual_seed(0)
    layer = train.Layer(ssmax)
    x, keys = torch.randn(4, 9, train.WIDTH), torch.tensor([0, 3, 7, 8])
    q, k, _ = layer.project(x)
    # The last query has position 8. Only its angle to a key affects the result.
    frequencies = 10_000 ** (-torch.arange(0, 32, 2) / 32)
    cos, sin = (f(torch.arange(9.0)[:, None] * frequencies) for f in (torch.cos, torch.sin))

    def turned(t):
        a, b = t.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    logits = turned(q)[:, :, -1:] @ turned(k).transpose(2, 3) / math.sqrt(32)
    weights = torch.softmax(logits * (0.25 * math.log(9) if ssmax else 1), dim=-1)[:, :, 0]
    expected = weights[torch.arange(4), :, keys]
    assert torch.allclose(layer.weight_on(x, keys), expected, atol=1e-6)
