"""What is done in a step does not depend on values, and no value gets in its way.

Python may look at one number at most: a graph cannot look at all, and on a GPU every
look is a wait. And what may not be looked at must come out finite by itself.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvedp.clipping import FlatClipping, NormalisedClipping
from curvedp.clipping.bounded import clipped_sum, where_needed
from curvedp.layers.conv import ConvGeometry
from curvedp.layers.dense import DenseIO
from curvedp.layers.linear import LinearGeometry
from curvedp.whitening import (
    DiagonalMap,
    IdentityWhitener,
    KroneckerMap,
    LayerwiseWhitener,
)
from curvedp.whitening.roots import IdentityRoot, LowRankRoot


def always(finite):
    """As a graph does it, which cannot look."""
    return True


class Looks(TorchDispatchMode):
    """Counts how often Python asks for a value: on a GPU it has to wait for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("replacing", "looks"), [(always, 0), (where_needed, 1)])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_step_looks_at_no_value_but_one(replacing, looks, mapped):
    """Without a graph it asks whether all examples are finite, and nothing else."""
    module = nn.Conv2d(4, 8, 3)
    x, d = torch.randn(3, 4, 6, 6), torch.randn(3, 8, 4, 4)
    geometry = ConvGeometry.of(module)
    io = DenseIO("conv", "weight", "bias", [(x, d)], geometry)
    whitener = IdentityWhitener()
    if mapped:
        basis = torch.linalg.qr(torch.randn(1, 37, 5, dtype=torch.float64))[0]
        values = torch.linspace(0.1, 1, 5, dtype=torch.float64).unsqueeze(0)
        root = LowRankRoot(basis, values, torch.ones(1, dtype=torch.float64))
        shape = module.weight.shape
        own = KroneckerMap("weight", "bias", shape, 1, IdentityRoot(), root)
        whitener = LayerwiseWhitener([own], ["weight", "bias"])
    options = {
        "parameters": dict(module.named_parameters()),
        "present": torch.ones(3, dtype=torch.bool),
        "step": 0,
        "replacing": replacing,
    }
    clipped_sum([io], FlatClipping(1.0), whitener, **options)  # finds what maps keep
    with Looks() as seen:
        clipped_sum([io], FlatClipping(1.0), whitener, **options)
    assert seen.count == looks


@pytest.mark.parametrize("long_input", [True, False])
@pytest.mark.parametrize("mapped", ["not", "kronecker", "diagonal"])
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize(("p", "r"), [(2, 5), (5, 2)])  # which of them is scaled
def test_a_factor_that_a_weight_would_overflow_adds_nothing(
    long_input, mapped, positions, p, r
):
    torch.manual_seed(0)
    x, d = torch.rand(2, positions, p), torch.rand(2, positions, r)
    long, short = (x, d) if long_input else (d, x)
    long[0], short[0] = long[0] * 3e37, short[0] * 1e-38
    io = DenseIO("a", "weight", None, [(x, d)], LinearGeometry(torch.Size((r, p))))
    whitener = IdentityWhitener()
    if mapped == "kronecker":
        basis = torch.linalg.qr(torch.randn(1, p, 1, dtype=torch.float64))[0]
        ones = torch.ones(1, 1, dtype=torch.float64)
        root = LowRankRoot(basis, 0.5 * ones, ones[0])
        own = KroneckerMap("weight", None, torch.Size((r, p)), 1, IdentityRoot(), root)
        whitener = LayerwiseWhitener([own], ["weight"])
    elif mapped == "diagonal":
        scales = torch.rand(r, p, dtype=torch.float64)
        whitener = LayerwiseWhitener([DiagonalMap({"weight": scales})], ["weight"])

    def summed(first):
        return clipped_sum(
            [io], NormalisedClipping(1.0), whitener,
            parameters={"weight": torch.zeros(r, p)},
            present=torch.tensor([first, True]), step=0, scale=64.0,
        ).values["weight"]  # fmt: skip

    assert bool(summed(True).isfinite().all())
    assert torch.equal(summed(True), summed(False))
