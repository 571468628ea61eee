"""Squares of gradients against one-at-a-time autograd, for every kind of layer."""

import pytest
import torch
from nets import ALL, composed, loss
from torch import nn

from curvedp.curvature import Estimate, estimate
from curvedp.curvature.squares import squares_of
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch, cover, synthesiser_like
from curvedp.probes import FeatureProbe, ModelLabels, NormalColumn
from curvedp.testing import per_example_gradients
from tests.whitening.maps import layer_ios

SIZE = 7
NETS = [n for n in composed() if sum(p.numel() for p in n.make().parameters()) < 1500]
TIED = [net for net in ALL if "tied" in str(net)][:2]


def squares(ios, moments):
    found = {}
    for io in ios:
        for factor in squares_of(io, moments).values():
            found |= {name: factor.mean(name) for name in factor.squares}
    return found


@pytest.mark.parametrize("net", [*NETS[:: max(1, len(NETS) // 8)], *TIED], ids=str)
def test_squares_are_those_of_autograd(net):
    model = net.make().double()
    coverage = cover(model, net.synthesiser(torch.float64), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(3), torch.float64)
    ios = layer_ios(model, coverage, batch, SIZE, keep_inputs=True)
    torch.manual_seed(0)  # dropout, as in the recorded pass
    exact = per_example_gradients(
        model, loss, batch.inputs, batch.targets, together=True
    )
    by_batch, by_example = (
        squares(ios, m) for m in ("batch-squares", "example-squares")
    )
    for name in coverage.parameters:
        g = exact[name]
        torch.testing.assert_close(
            by_batch[name], g.mean(0).square(), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(
            by_example[name], g.square().mean(0), rtol=1e-6, atol=0
        )


def test_batches_are_averaged_and_examples_do_not_feel_the_batch_size():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    shape = Batch(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))

    def per_example(output, targets):
        return nn.functional.cross_entropy(output, targets, reduction="none")

    coverage = cover(model, synthesiser_like(shape, model), per_example)
    probe = FeatureProbe(tuple(NormalColumn() for _ in range(4)))

    def mean(moments, size, batches, seed=0):
        how = Estimate(probe, ModelLabels(), size, batches, moments=moments)
        generator = torch.Generator().manual_seed(seed)
        found = estimate(model, coverage.covered, how, per_example, generator)
        factor = found.layers["0.weight"]
        return float(factor.mean("0.weight").mean())

    ratio = mean("example-squares", 50, 200) / mean("example-squares", 500, 20)
    assert abs(ratio - 1) < 0.1
    # labels are drawn from the model, so the mean gradient is noise: 1 / size
    ratio = mean("batch-squares", 50, 200) / mean("batch-squares", 500, 200)
    assert abs(ratio / 10 - 1) < 0.15


def test_unknown_moments_and_a_mean_loss_are_refused():
    probe = FeatureProbe((NormalColumn(),))
    with pytest.raises(ConfigurationError, match="'squares'"):
        Estimate(probe, ModelLabels(), moments="squares")
    with pytest.raises(ConfigurationError, match="mean_loss"):
        Estimate(probe, ModelLabels(), mean_loss=True, moments="batch-squares")
