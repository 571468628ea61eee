"""The clipped sum is the one-at-a-time reference; nobody contributes more than C."""

import re
from operator import attrgetter

import pytest
import torch
from nets import ALL, composed, loss
from passes import SEED, add_up, flat, forced, largest_contribution, portions, record

from curvedp.clipping import FlatClipping, NormalisedClipping, PerLayerClipping
from curvedp.errors import CouplingError, CoverageError
from curvedp.layers import cover
from curvedp.layers.costs import NormMethod
from curvedp.testing import clipped_sum, per_example_gradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)

#: Largest relative deviation from the reference. float32: the rounding of a backward
#: pass of a few layers, and what norms are raised and contributions are shortened by
#: for the sum's. bfloat16 keeps 8
#: bits of every intermediate value. In float64 what is left is the 2^-20 that the rules
#: take off the bound.
TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2}

#: The bound holds up to the rounding of a float32 coordinate.
SLACK = 1e-6

SIZE = 7
PHYSICAL = (7, 3, 2)
#: None: as trained, gradients settled where they are small. Otherwise all inputs are
#: kept, and norms computed in one way.
METHODS = (None, NormMethod.GRAM, NormMethod.INSTANTIATE)


def rules(lengths):
    """All rules, at a bound that clips about half of the examples."""
    bound = float(lengths.median())
    return FlatClipping(bound), NormalisedClipping(bound), PerLayerClipping(bound)


def reference(net, model, batch):
    if not net.random:
        return per_example_gradients(model, loss, batch.inputs, batch.targets)
    torch.manual_seed(SEED)
    return per_example_gradients(
        model, loss, batch.inputs, batch.targets, together=True
    )


@pytest.mark.parametrize(
    "dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("net", ALL, ids=str)
def test_the_sum_is_the_reference_and_every_contribution_is_bounded(net, dtype):
    model = net.make().to(dtype)
    coverage = cover(model, net.synthesiser(dtype), loss)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert sorted(coverage.parameters) == sorted(trainable)
    layers = coverage.layers
    batch = net.batch(SIZE, torch.Generator().manual_seed(5), dtype)

    # a net that draws random numbers draws others in other portions
    for physical in PHYSICAL[: 1 if net.random else None]:
        gradients = reference(net, model, batch)
        lengths = flat_rows(gradients).norm(dim=1)
        recorded = {
            kept: [
                (record(model, coverage, part, physical, loss, kept), present)
                for part, present in portions(batch, SIZE, physical)
            ]
            for kept in ((False, True) if physical == PHYSICAL[0] else (False,))
        }
        for rule in rules(lengths):
            parts = layers if rule.name == "per-layer" else None
            expected = flat(clipped_sum(gradients, rule.name, rule.bound, layers=parts))
            # small batches show that portions merge; the largest shows the methods
            for method in METHODS if physical == PHYSICAL[0] else METHODS[:1]:
                total = None
                for ios, present in recorded[method is not None]:
                    part = add_up(model, forced(ios, method), rule, present)
                    total = part if total is None else total.merge(part)
                    longest = largest_contribution(forced(ios, method), rule, present)
                    assert longest <= 1 + SLACK
                error = (flat(total.values) - expected).norm() / expected.norm()
                assert error <= TOLERANCE[dtype], (rule.name, method)
            if physical == PHYSICAL[0]:
                ios = recorded[False][0][0]
                for i in range(SIZE):
                    alone = add_up(model, ios, rule, torch.arange(SIZE) == i)
                    length = float(flat(alone.values).norm())
                    assert length <= rule.bound * (1 + SLACK)


def flat_rows(gradients):
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)


def test_there_are_enough_nets_and_they_use_every_way_to_a_gradient():
    assert len({str(net) for net in composed()}) >= 40
    assert {torch.float32, torch.bfloat16} <= TOLERANCE.keys()
    kinds, ties, repeats = set(), 0, 0
    for net in ALL:
        model = net.make()
        coverage = cover(model, net.synthesiser(), loss)
        kinds |= {item.site.kind for item in coverage.covered}
        ties += len(coverage.layers) < len(coverage.covered)
        repeats += any("called" in name or "twice" in name for name in str(net).split())
    assert ties >= 8
    assert repeats >= 2
    assert kinds >= {
        "Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LayerNorm", "RMSNorm",
        "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "expanded",
        "vmap", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "EmbeddingBag",
        "RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell",
    }  # fmt: skip


class Functional(torch.nn.Module):
    """A net whose head uses the weight of one of its layers."""

    def __init__(self, inner, weight):
        super().__init__()
        self.inner, self.weight = inner, weight

    def forward(self, *inputs):
        output = self.inner(*inputs)
        weight = attrgetter(self.weight)(self.inner)
        return output + weight.square().sum() * output


@pytest.mark.parametrize("net", composed()[::3], ids=str)
def test_functional_use_of_a_weight_is_refused_by_name(net):
    inner = net.make()
    name = next(n for n, p in inner.named_parameters() if p.requires_grad)
    with pytest.raises(
        (CoverageError, CouplingError), match=re.escape(f"inner.{name}")
    ):
        cover(Functional(inner, name), net.synthesiser(), loss)
