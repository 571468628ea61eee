"""N examples against N - 1: does a release depend on the number of examples?

Under add/remove that number is protected. Opacus 1.6 divides the noisy sum by
``int(N / steps of a pass)``, so with one example less the noise on every parameter is
larger by one part in the batch size. Nobody sees that in one coordinate; whoever adds
up the squares of all of them does. Gradients are zero here: the noise alone tells.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvedp import make_private
from curvedp.accounting import PoissonGaussianEvent, repeated
from curvedp.accounting.accountants import PLDAccountant
from curvedp.auditing import Rates, epsilon_at
from curvedp.barrier import Relation

STEPS, RATE, DELTA = 20, 0.01, 1e-5
#: Examples, batch size, parameters, runs of each kind. The second is the setting of the
#: first report: one part in 500.
QUICK = (10_000, 100, 20_000, 100)
FULL = pytest.param((50_000, 500, 100_000, 400), marks=pytest.mark.slow)


class Table(nn.Module):
    """Many parameters, and examples ``x = 0`` that have no gradient for any of them."""

    def __init__(self, parameters):
        super().__init__()
        self.table = nn.Embedding(parameters, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, x):
        return self.table(torch.zeros_like(x, dtype=torch.int64)).squeeze(-1) * x


def claim():
    """Of both libraries: the same mechanism, whatever N is."""
    event = repeated(PoissonGaussianEvent(1.0, RATE), STEPS)
    return PLDAccountant().epsilon(event, Relation.ADD_REMOVE, DELTA)


def bound(run, size, batch, parameters, runs):
    """Epsilon at least, from the mean squares of all updates.

    The attacker knows what both would be, and says N - 1 above the value that three
    standard errors of N's leave free.
    """
    usual = (1 / batch) ** 2
    line = usual * (1 + 3 * np.sqrt(2 / (STEPS * parameters)))
    hits, alarms = (
        sum(run(examples, batch, parameters, seed) > line for seed in range(runs))
        for examples in (size - 1, size)
    )
    return epsilon_at(Rates(hits, runs, alarms, runs), DELTA)


def opacus_run(size, batch, parameters, seed):
    """Mean square of what Opacus adds to the parameters, over all steps."""
    from opacus import PrivacyEngine

    model = Table(parameters)
    data = TensorDataset(torch.zeros(size, 1))
    _, optimizer, _ = PrivacyEngine(accountant="prv").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(2 * seed + size % 2),
    )
    (weight,) = model.parameters()
    squares = 0.0
    for _ in range(STEPS):
        before = weight.detach().clone()
        weight.grad_sample = torch.zeros(
            1, *weight.shape
        )  # of a batch without gradient
        optimizer.step()
        squares += float((weight.detach() - before).square().mean())
        optimizer.zero_grad()
    return squares / STEPS


def curvedp_run(size, batch, parameters, seed, divisor=None):
    """The same of curvedp, at the rate and the divisor that were declared."""
    model = Table(parameters)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        TensorDataset(torch.zeros(size, 1), torch.zeros(size, 1)),
        loss="mse",
        noise_multiplier=1.0,
        delta=DELTA,
        sample_rate=RATE,
        steps=STEPS,
        expected_batch_size=divisor or batch,
        physical_batch_size=2 * batch,
        unsafe_reproducible_noise=2 * seed + size % 2,
    )
    (weight,) = model.parameters()
    squares, before = 0.0, weight.detach().clone()
    for data in private.loader:
        step = private.step
        private.train_on(tuple(data))
        if private.step > step:
            squares += float((weight.detach() - before).square().mean())
            before = weight.detach().clone()
    return squares / STEPS


def careless_run(size, batch, parameters, seed):
    """curvedp with a divisor that somebody took from the data."""
    return curvedp_run(size, batch, parameters, seed, divisor=int(RATE * size))


def test_the_claim_is_that_of_the_report():
    assert claim() == pytest.approx(0.465, abs=0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", [QUICK, FULL])
def test_opacus_tells_the_number_of_examples(setting):
    pytest.importorskip("opacus")
    assert bound(opacus_run, *setting) >= 3 > claim()


LARGE = pytest.param((50_000, 500, 100_000, 100), marks=pytest.mark.slow)
#: One part in 10, so that few runs are enough to see it if it is there.
SMALL = (1000, 10, 400, 12)


@pytest.mark.parametrize("setting", [SMALL, LARGE])
def test_curvedp_does_not(setting):
    assert bound(curvedp_run, *setting) <= claim()


def test_the_attack_would_see_it_in_curvedp_too():
    assert bound(careless_run, *SMALL) > claim()
