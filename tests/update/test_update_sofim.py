"""SOFIM against the whole matrix, FedAdam and FedYogi against their formulas."""

import math
import resource
import subprocess
import sys

import pytest
import torch

from curvedp.errors import ConfigurationError
from curvedp.testing import check_transform, reference
from curvedp.update import Chain, FedAdam, FedYogi, Gradient, Momentum, Sofim

from .sequences import SHAPES, coordinates, parameters, run, sequence, worst

FORMS = ("paper", "code")


def split(vector, at=(7,)):
    """A vector as several parameters, which the transform sees as one vector again."""
    first, *rest = torch.tensor_split(vector, at)
    return {"head": first.clone(), **{f"p{i}": r.clone() for i, r in enumerate(rest)}}


def joined(values):
    return torch.cat([v.reshape(-1) for v in values.values()])


def vectors(steps, d, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(d, generator=generator, dtype=dtype) for _ in range(steps)]
    # what gradients are like: a common part, and noise
    return [scale * (x + drawn[0]) for x in drawn]


def updates(transform, gradients):
    state = transform.init(split(gradients[0]))
    found = []
    for gradient in gradients:
        output, state = transform.update(Gradient(split(gradient)), state)
        found.append(joined(output.values))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [9, 200, 2000])
@pytest.mark.parametrize(
    ("beta", "rho", "scale"), [(0.9, 0.5, 1.0), (0.0, 0.1, 3.0), (0.99, 50.0, 0.01)]
)
def test_sherman_morrison_is_the_inverse_of_the_whole_matrix(form, d, beta, rho, scale):
    steps = 3 if d == 2000 else 8
    gradients = vectors(steps, d, scale=scale)
    found = updates(Sofim(beta, rho, form), gradients)
    expected = reference.sofim(gradients, beta, rho, form)
    for mine, exact in zip(found, expected, strict=True):
        # (a solve loses as many digits as the condition of the matrix has: here 6)
        assert float((mine - exact).norm()) <= 1e-9 * float(exact.norm())


def test_the_two_forms_are_not_the_same_method():
    gradients = vectors(4, 50)
    paper, code = (updates(Sofim(form=form), gradients)[-1] for form in FORMS)
    assert float((paper - code).norm()) > 0.5 * float(code.norm())


def test_the_paper_form_keeps_what_is_orthogonal_to_the_average():
    # beta 0: M is U, and the update is U / (rho + |U|^2), along U alone
    u = vectors(1, 30)[0]
    (update,) = updates(Sofim(beta=0.0, rho=0.25), [u])
    expected = u / (0.25 + float(u @ u))
    torch.testing.assert_close(update, expected, rtol=1e-12, atol=0)


def test_float32_states_hold_the_digits_that_they_can():
    gradients = vectors(6, 300, dtype=torch.float32)
    found = updates(Sofim(), gradients)
    expected = reference.sofim(gradients, 0.9, 0.5, "paper")
    for mine, exact in zip(found, expected, strict=True):
        assert float((mine.double() - exact).norm()) <= 1e-5 * float(exact.norm())


# -- rho and beta from the noise ------------------------------------------------------


def noisy(d, variance, seed):
    (g,) = vectors(1, d, seed)
    values = split(g)
    return Gradient(values, {n: torch.tensor(variance).double() for n in values})


def test_adaptive_rho_is_the_energy_of_the_noise_in_the_average():
    d, variance, beta = 40, 0.3, 0.8
    gradients = [noisy(d, variance, seed) for seed in range(5)]
    adaptive = Sofim(beta, 1e-6, adaptive_rho=True)
    state, plain = (
        adaptive.init(gradients[0].values),
        Sofim(beta, 1e-6).init(gradients[0].values),
    )
    for t, gradient in enumerate(gradients, start=1):
        output, state = adaptive.update(gradient, state)
        weights = [(1 - beta) * beta**j for j in range(t)]
        rho = d * variance * math.fsum(w * w for w in weights)
        same, plain = Sofim(beta, rho).update(gradient, plain)
        torch.testing.assert_close(joined(output.values), joined(same.values))


def test_adaptive_beta_brings_the_noise_down_to_rho():
    d, variance, rho = 40, 0.3, 0.5
    gradient = noisy(d, variance, 0)
    adaptive = Sofim(rho=rho, adaptive_beta=True)
    _, state = adaptive.update(gradient, adaptive.init(gradient.values))
    beta = 1 - state["weight"]
    assert d * variance * (1 - beta) / (1 + beta) == pytest.approx(rho)
    # with next to no noise there is nothing to average; with a lot there is a limit
    for size, expected in ((1e-9, 0.0), (1e9, 0.99)):
        gradient = noisy(d, size, 0)
        _, state = adaptive.update(gradient, adaptive.init(gradient.values))
        assert 1 - state["weight"] == pytest.approx(expected)


def test_the_energy_counts_a_variance_of_every_coordinate():
    d = 40
    one, each = noisy(d, 0.3, 1), noisy(d, 0.3, 1)
    each = Gradient(
        each.values, {n: torch.full_like(v, 0.3) for n, v in each.values.items()}
    )
    adaptive = Sofim(rho=1e-6, adaptive_rho=True, adaptive_beta=True)
    first, _ = adaptive.update(one, adaptive.init(one.values))
    second, _ = adaptive.update(each, adaptive.init(one.values))
    torch.testing.assert_close(joined(first.values), joined(second.values))


def test_refusals():
    with pytest.raises(ConfigurationError, match="paper, code"):
        Sofim(form="published")
    with pytest.raises(ConfigurationError, match="rho"):
        Sofim(rho=0.0)
    adaptive = Sofim(adaptive_rho=True)
    gradient = Gradient(split(vectors(1, 9)[0]))
    with pytest.raises(ConfigurationError, match="how much noise"):
        adaptive.update(gradient, adaptive.init(gradient.values))
    Chain((Momentum(), adaptive))
    with pytest.raises(ConfigurationError, match="does not say"):
        Chain((FedAdam(), adaptive))


# -- FedAdam, FedYogi -----------------------------------------------------------------


@pytest.mark.parametrize("yogi", [False, True])
@pytest.mark.parametrize("settings", [(0.9, 0.99, 1e-3), (0.0, 0.5, 0.1)])
def test_adaptive_servers_are_their_formulas(yogi, settings):
    transform = (FedYogi if yogi else FedAdam)(*settings)
    gradients = sequence(40, 3, torch.float64)
    outputs, _ = run(transform, gradients, parameters(torch.float64))
    for parameter, shape in SHAPES.items():
        inputs = coordinates([g.values for g in gradients], parameter, shape)
        found = coordinates([o.values for o in outputs], parameter, shape)
        for one, mine in zip(inputs, found, strict=True):
            assert worst(mine, reference.fedopt(one, *settings, yogi=yogi)) <= 1e-9


@pytest.mark.parametrize(
    "transform",
    [
        Sofim(),
        Sofim(form="code"),
        Sofim(adaptive_rho=True, adaptive_beta=True),
        Sofim(form="code", adaptive_rho=True),
        FedAdam(),
        FedYogi(),
    ],
    ids=repr,
)
def test_they_are_transforms(transform):
    check_transform(transform, parameters())


# -- memory ---------------------------------------------------------------------------

TEN_MILLION = """
import resource, torch
from curvedp.update import Gradient, Sofim
d = 10_000_000
model = {"w": torch.zeros(d)}
sofim = Sofim(form=FORM)
sofim.update(Gradient({"w": torch.ones(9)}), sofim.init({"w": torch.zeros(9)}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = sofim.init(model)
for step in range(3):
    update, state = sofim.update(Gradient({"w": torch.ones(d)}), state)
    model["w"].sub_(update.values["w"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_ten_million_parameters_take_less_than_500_megabytes(form):
    assert resource.getpagesize()  # kilobytes below are Linux's
    done = subprocess.run(
        [sys.executable, "-c", TEN_MILLION.replace("FORM", repr(form))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 500 * 1024
