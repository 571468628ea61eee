r"""DP-NGD, eq. 12: one clipped example moves the predictions by at most eta^2 C^2 / 2.

``KL(p || p') ~ delta^T F delta / 2`` for small steps; with ``delta = eta P v``,
``||v|| <= C`` and ``P = F~^-1/2``, that is ``eta^2 C^2 / 2`` if F~ is not below F.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curvedp.curvature import Estimate, estimate
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.probes import FeatureProbe, ModelLabels
from curvedp.whitening import JointWhitening

INPUTS, CLASSES = 6, 4
CLIP = 3.0


def loss(output, targets):
    return F.cross_entropy(output, targets, reduction="none")


def softmax_regression():
    """At zero all predictions are uniform, and F is exactly ``A (x) G``."""
    model = nn.Linear(INPUTS, CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def divergences(model, rate, floor=0.05):
    """KL of the update of each of 40 hostile examples, over ``eta^2 C^2 / 2``."""
    template = Batch(torch.zeros(1, INPUTS), torch.zeros(1, dtype=torch.int64))
    coverage = cover(model, synthesiser_like(template, model), loss)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    how = Estimate(FeatureProbe(INPUTS), ModelLabels(), 2000, 5)
    generator = torch.Generator().manual_seed(1)
    factors = estimate(model, coverage.covered, how, loss, generator)
    ratio = floor**0.5
    whitener = JointWhitening(ratio, matched=False).build(factors, parameters)
    x = 5 * torch.randn(40, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (40,), generator=generator)
    recording = Recording(model, coverage.covered, 40)
    loss(recording.forward((x,), {}), y).sum().backward()
    ios = recording.layer_ios()
    norms = torch.stack([whitener.sq_norms(io) for io in ios]).sum(0).sqrt()
    found = []
    probe = torch.randn(5000, INPUTS, generator=generator)
    before = model(probe).log_softmax(1).detach()
    for i in range(40):
        g = {n: v[i] for io in ios for n, v in io.per_example().items()}
        scale = min(1.0, CLIP / float(norms[i]))
        update = whitener.adjoint({n: scale * v for n, v in whitener.apply(g).items()})
        moved = {n: parameters[n] - rate * update[n] for n in parameters}
        after = torch.func.functional_call(model, moved, (probe,)).log_softmax(1)
        divergence = (before.exp() * (before - after)).sum(1).mean()
        found.append(float(divergence) / (rate * CLIP) ** 2 * 2)
    return torch.tensor(found)


def test_where_the_kronecker_product_is_exact_the_bound_holds():
    found = divergences(softmax_regression(), rate=1e-3)
    assert found.max() <= 1.05  # sampling of the factors
    assert found.max() >= 0.5, "most of these examples are clipped: it is nearly tight"


def test_on_a_network_it_holds_up_to_the_factorisation():
    found = divergences(network(), rate=1e-3)
    assert found.max() <= 1.5
    assert found.median() <= 1


def test_clamping_only_lowers_it():
    loose, tight = (divergences(network(), 1e-3, f).max() for f in (1e-3, 1.0))
    assert tight < loose


@pytest.mark.parametrize("rate", [1e-4, 1e-3, 1e-2])
def test_it_grows_with_the_square_of_the_step(rate):
    found = divergences(softmax_regression(), rate)
    assert 0.4 <= float(found.max()) <= 1.1
