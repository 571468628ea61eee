"""Random nets that cover every rule, with batches and a per-example loss for each.

A net is a stem, a few blocks that keep the shape, and a head. Net number i of a family
contains block number i, so that a family covers all of its blocks; the other blocks,
the sizes and the weights are random.
"""

import random

import torch
from nets_base import TOKENS, Net, loss
from nets_image import image_blocks, signal_blocks, volume_blocks
from nets_sequence import sequence_blocks
from nets_shared import shared
from nets_whole import TokenModel, structured
from torch import nn

from curvedp.models import build

__all__ = ["ALL", "TOKENS", "Net", "TokenModel", "composed", "loss", "structured"]


class Pooled(nn.Module):
    """Mean over all positions, then a Linear: the head of every net here."""

    def __init__(self, features, channels_last):
        super().__init__()
        self.linear = nn.Linear(features, 3)
        self.channels_last = channels_last

    def forward(self, x):
        x = x.tanh()
        return self.linear(x.mean(1) if self.channels_last else x.flatten(2).mean(2))


def built_in():
    """The models that the package ships, small.

    The wide and the deep residual net are left out: they are made of the blocks above
    and take longer than all the others together.
    """
    settings = {
        "cnn": {"width": 4, "dense": 8},
        "mlp": {"width": 8},
        "small-cnn": {"dense": 8},
        "vit": {"dim": 12, "depth": 1, "heads": 2, "patch": 4},
    }
    shapes = {"cnn": 8, "mlp": 4, "small-cnn": 8, "vit": 8, "logreg": 4}

    def net(name, side):
        def inputs(size, generator):
            return torch.rand(size, 1, side, side, generator=generator)

        def make():
            return build(name, (1, side, side), 3, **settings.get(name, {}))

        return Net(f"built-in-{name}", make, inputs)

    return [net(name, side) for name, side in shapes.items()]


def composed():
    """Random compositions: as many as there are blocks, each block in at least one."""
    t, d, c, side = 5, 6, 4, 6
    shapes = {
        "sequence": ((t, d), sequence_blocks(t, d), d),
        "image": ((c, side, side), image_blocks(c, side), c),
        "volume": ((c, 4, 4, 4), volume_blocks(c), c),
        "signal": ((c, 12), signal_blocks(c), c),
    }
    nets = []
    for family, (shape, blocks, features) in shapes.items():
        for i, name in enumerate(blocks):
            nets.append(_compose(family, shape, blocks, features, name, seed=i))
    return nets


def _compose(family, shape, blocks, features, name, seed):
    def make():
        rng = random.Random(seed)
        chosen = [blocks[name]]
        if rng.randrange(2):  # a norm may undo what stands before it
            chosen.append(blocks[rng.choice(list(blocks))])
        rng.shuffle(chosen)
        return nn.Sequential(
            *(block() for block in chosen),
            Pooled(features, channels_last=family == "sequence"),
        )

    def inputs(size, generator):
        return torch.randn(size, *shape, generator=generator)

    return Net(f"{family}-{name}", make, inputs)


ALL = composed() + structured() + shared() + built_in()
