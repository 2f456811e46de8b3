"""Trains two layers of attention to name the word that followed the last occurrence of a word, with SSMax and Softmax.
Draws the attention on that word, the needle, in contexts that are longer than the training contexts.

    python examples/pytorch/train.py  # a few minutes; writes needle.png
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from ssmax_torch import Rope, SSMax, attention
from ssmax_torch.mask import Causal

WORDS, WIDTH, HEADS = 128, 64, 2
FEWEST_PAIRS, MOST_PAIRS = 4, 16  # pairs of a training sequence
IGNORED = -100  # target of a word that the model cannot predict
NAMES = ("Softmax", "SSMax")
CAUSAL, ROPE = Causal(), Rope(WIDTH // HEADS)


class Layer(nn.Module):
    def __init__(self, ssmax: bool):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        # s · ln n starts near 1 at the training lengths, as in Softmax.
        self.attention = SSMax(HEADS, start=0.25) if ssmax else attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out = self.attention(q, k, v, mask=CAUSAL, rope=ROPE)
        return x + self.out(out.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys and values: views [batch, heads, sequence, width] of one product."""
        return self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)

    def weight_on(self, x: Tensor, keys: Tensor) -> Tensor:
        """Returns the last query's attention on key keys[i] of sequence i, [batch, heads]. Values are 1 there, else 0."""
        q, k, _ = self.project(x)
        marked = F.one_hot(keys, x.shape[1]).to(x.dtype)[:, None, :, None].expand(-1, HEADS, -1, 1)
        return self.attention(q, k, marked.contiguous(), mask=CAUSAL, rope=ROPE)[:, :, -1, 0]


class Model(nn.Module):
    def __init__(self, ssmax: bool):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(ssmax) for _ in range(2))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def draw_batch(sequences: int, pairs: int, copies: bool) -> tuple[Tensor, Tensor]:
    """Returns words and targets: pairs of different words, and then the same pairs again. If `copies`, the pairs keep
    their order and every word is a target. Else they are shuffled and the second word of each pair is a target."""
    first = torch.rand(sequences, WORDS).argsort(dim=1)[:, : 2 * pairs].unflatten(1, (pairs, 2))
    order = torch.arange(pairs).expand(sequences, pairs) if copies else torch.rand(sequences, pairs).argsort(dim=1)
    again = first.gather(1, order[..., None].expand(-1, -1, 2))
    words = torch.cat([first, again], dim=1).flatten(1)
    targets = words.roll(-1, dims=1)
    targets[:, : 2 * pairs] = targets[:, -1] = IGNORED
    if not copies:
        targets[:, 2 * pairs + 1 :: 2] = IGNORED
    return words, targets


def train(ssmax: bool, steps: int, seed: int) -> tuple[Model, list[float]]:
    """Trains a model. Returns the model and the loss of each step."""
    torch.manual_seed(seed)
    model, losses = Model(ssmax), []
    # s affects all of attention, so its learning rate is smaller.
    s = [parameter for name, parameter in model.named_parameters() if name.endswith("attention.s")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("attention.s")]
    groups = [{"params": others, "lr": 1e-2, "weight_decay": 0.2}, {"params": s, "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50, 1.5 * (1 - step / steps) + 0.01)
    )
    for _ in (bar := tqdm(range(steps), desc=NAMES[ssmax], unit="step")):
        pairs = int(torch.randint(FEWEST_PAIRS, MOST_PAIRS + 1, ()))
        words, targets = map(torch.cat, zip(draw_batch(16, pairs, False), draw_batch(16, pairs, True)))
        loss = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model, losses


@torch.no_grad()
def attention_on_needle(model: Model, length: int, sequences: int = 64) -> tuple[float, float]:
    """Returns the attention on the needle, and how often the model names the needle. The last word occurred once before, at
    a random depth, and the needle followed. The attention is that of the last layer, as the mean over sequences, for
    the head with the largest mean."""
    alphabet = torch.rand(sequences, WORDS).argsort(dim=1)
    words = alphabet.gather(1, torch.randint(2, WORDS, (sequences, length)))
    depth = torch.randint(0, length - 2, (sequences, 1))
    words.scatter_(1, torch.cat([depth, depth + 1], dim=1), alphabet[:, :2])
    words[:, -1] = alphabet[:, 0]
    x = model.layers[0](model.embedding(words))
    weight = model.layers[1].weight_on(x, depth[:, 0] + 1).mean(dim=0).max()
    return weight.item(), (model(words)[:, -1].argmax(dim=1) == alphabet[:, 1]).double().mean().item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", default="needle.png")
    arguments = options.parse_args()
    lengths = [4 * MOST_PAIRS * 2**i for i in range(5)]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for ssmax in (False, True):
        model, _ = train(ssmax, arguments.steps, arguments.seed)
        weights, found = zip(*(attention_on_needle(model, length) for length in tqdm(lengths, desc="needles")))
        axes.plot(lengths, weights, marker="o", label=NAMES[ssmax])
        for row in zip(lengths, weights, found):
            print("{:6} words: {:.3f} of the attention on the needle, {:5.1%} found".format(*row))
    axes.axvline(lengths[0], color="gray", linestyle=":", label="longest in training")
    axes.set(xscale="log", xlabel="context, words", ylabel="attention on the needle", ylim=(0, 1), xticks=lengths)
    axes.set_xticks(lengths, lengths, minor=False)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    import matplotlib.pyplot as plt

    main()
