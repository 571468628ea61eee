"""What the planner says of a layer is what runs: products are counted, as they run."""

from math import prod

import pytest
import torch
from nets import ALL, Net
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from curvedp.layers.dense import DenseIO
from curvedp.layers.io import UnreachedIO
from curvedp.layers.joined import JoinedIO
from curvedp.whitening import IdentityWhitener
from curvedp.whitening.explained import choices

from .maps import WHITENINGS, build, factors, recorded, trainable

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)
ROWS = 3


def counted(work):
    """Products of what ``work`` does, a multiplication and an addition each."""
    # torch counts the product that is not in place
    known = {torch.ops.aten.baddbmm_: lambda _, a, b, **__: 2 * prod(a) * b[-1]}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        result = work()
    return counter.get_total_flops(), result


def shapes_of(ios):
    found = {}
    for io in ios:
        for part in io.parts if isinstance(io, JoinedIO) else [io]:
            if isinstance(part, DenseIO):
                found[part.weight] = part.shape
    return found


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1), nn.Tanh(), nn.Conv2d(40, 6, 3, groups=2),
        nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, 40), nn.Tanh(), nn.Linear(40, 3),
    )  # fmt: skip


def tokens_net():
    return nn.Sequential(
        nn.Embedding(13, 50), nn.Linear(50, 60), nn.LayerNorm(60), nn.Tanh(),
        nn.Linear(60, 70), nn.Flatten(), nn.Linear(70 * 6, 3),
    )  # fmt: skip


def wide_net():
    """Many positions and few outputs: gradients are instantiated."""
    return nn.Sequential(nn.Linear(40, 12), nn.Tanh(), nn.Flatten(), nn.Linear(192, 3))


LARGER = [
    Net("images", conv_net, lambda n, g: torch.rand(n, 3, 8, 8, generator=g)),
    Net("tokens", tokens_net, lambda n, g: torch.randint(0, 13, (n, 6), generator=g)),
    Net("wide", wide_net, lambda n, g: torch.rand(n, 16, 40, generator=g)),
]
SAMPLED = ALL[::14]


@pytest.mark.parametrize("keep_inputs", [True, False])
@pytest.mark.parametrize("net", [*LARGER, *SAMPLED], ids=lambda net: net.name)
def test_products_that_run_are_those_that_are_announced(net, keep_inputs):
    model, _, whole = recorded(net, ROWS, 0)
    ios = whole if keep_inputs else recorded(net, ROWS, 0, keep_inputs=False)[2]
    known, parameters = factors(whole), trainable(model)
    shapes = shapes_of(whole)
    for name in (None, *WHITENINGS):
        whitener = IdentityWhitener()
        if name is not None:
            whitener = build(name, known, parameters)
        mapping = 0.0
        for io in ios:
            if isinstance(io, UnreachedIO):
                continue
            found = choices(whitener, io, shapes)
            mapping += sum(c.mapping.products for c in found)
            if isinstance(io, JoinedIO) and _tied(io):
                continue  # inner products of the parts are left out, and said to be
            whitener.sq_norms(io)  # what is computed once is there afterwards
            products, _ = counted(lambda w=whitener, io=io: w.sq_norms(io))
            said = sum(
                (0.0 if c.norms == "written" else c.norm.products)
                + c.whitening.products
                for c in found
            )
            assert products == ROWS * said, (name, io.name, found)
        if not any(_tied(io) for io in ios):
            products, _ = counted(lambda w=whitener: w.apply(parameters))
            assert products == mapping, name


def _tied(io):
    names = [n for part in getattr(io, "parts", []) for n in part.names]
    return len(names) != len(set(names))


def test_forward_and_backward_are_six_products_a_weight_and_position():
    # torch counts the weight gradient of a grouped convolution twice
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 7, 3, stride=2), nn.Flatten(), nn.Linear(63, 3)
        )

    net = Net("plain", make, LARGER[0].inputs)
    model, _, ios = recorded(net, ROWS, 0)
    whole = sum(
        c.forward_backward.products
        for io in ios
        for c in choices(IdentityWhitener(), io, {})
    )
    x = torch.rand(ROWS, 3, 8, 8, requires_grad=True)
    products, _ = counted(lambda: model(x).sum().backward())
    assert products == ROWS * whole
