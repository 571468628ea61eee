"""Every update rule against sums over the whole past, one coordinate at a time."""

from functools import partial

import pytest
import torch

from curvedp.errors import ConfigurationError
from curvedp.testing import check_transform, reference
from curvedp.update import (
    AdamBC,
    Chain,
    ExponentialAverage,
    Gradient,
    KalmanFilter,
    Momentum,
    TailAverage,
)

from .sequences import SHAPES, coordinates, parameters, run, sequence, worst

STEPS = 60

#: Transform, the same by definition, and whether it is linear in the gradients.
LINEAR = {
    "heavy ball": (Momentum(0.9), partial(reference.heavy_ball, mu=0.9)),
    "heavy ball, short": (Momentum(0.3), partial(reference.heavy_ball, mu=0.3)),
    "nesterov": (Momentum(0.8, nesterov=True), partial(reference.nesterov, mu=0.8)),
    "kalman": (KalmanFilter(0.7), partial(reference.kalman_filter, kappa=0.7)),
    "kalman, slow": (KalmanFilter(0.1), partial(reference.kalman_filter, kappa=0.1)),
    "kalman, off": (KalmanFilter(1.0), partial(reference.kalman_filter, kappa=1.0)),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_linear_rules_and_the_noise_in_them(name, dtype, seed):
    transform, slow = LINEAR[name]
    like = parameters(dtype)
    # releases of a bfloat16 model are float32
    released = torch.float64 if dtype == torch.float64 else torch.float32
    gradients = sequence(STEPS, seed, released)
    outputs, _ = run(transform, gradients, like)
    for parameter, shape in SHAPES.items():
        inputs = coordinates([g.values for g in gradients], parameter, shape)
        noises = coordinates([g.noise_variance for g in gradients], parameter, shape)
        found = coordinates([o.values for o in outputs], parameter, shape)
        tracked = coordinates([o.noise_variance for o in outputs], parameter, shape)
        for i in range(len(inputs)):
            assert worst(found[i], slow(inputs[i])) <= 1e-6
            expected = reference.weighted_variances(slow, noises[i])
            assert worst(tracked[i], expected) <= 1e-6


@pytest.mark.parametrize("settings", [(0.9, 0.999, 1e-8), (0.5, 0.9, 1e-3), (0, 0, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_adambc_is_its_formula(settings, dtype, seed):
    released = torch.float64 if dtype == torch.float64 else torch.float32
    gradients = sequence(STEPS, seed, released)
    outputs, _ = run(AdamBC(*settings), gradients, parameters(dtype))
    for parameter, shape in SHAPES.items():
        inputs = coordinates([g.values for g in gradients], parameter, shape)
        noises = coordinates([g.noise_variance for g in gradients], parameter, shape)
        found = coordinates([o.values for o in outputs], parameter, shape)
        for one, noise, mine in zip(inputs, noises, found, strict=True):
            expected = reference.adambc(one, noise, *settings)
            assert worst(mine, expected) <= 1e-6


def test_a_chain_is_in_order():
    """Momentum before AdamBC is another method than after it; each as written."""
    gradients = sequence(STEPS, 11, torch.float64)
    like = parameters(torch.float64)
    first, _ = run(Chain((Momentum(0.6), AdamBC(0.8, 0.95, 1e-2))), gradients, like)
    second, _ = run(Chain((AdamBC(0.8, 0.95, 1e-2), Momentum(0.6))), gradients, like)
    ball = partial(reference.heavy_ball, mu=0.6)
    for parameter, shape in SHAPES.items():
        inputs = coordinates([g.values for g in gradients], parameter, shape)
        noises = coordinates([g.noise_variance for g in gradients], parameter, shape)
        before = coordinates([o.values for o in first], parameter, shape)
        after = coordinates([o.values for o in second], parameter, shape)
        for i, (one, noise) in enumerate(zip(inputs, noises, strict=True)):
            tracked = reference.weighted_variances(ball, noise)
            expected = reference.adambc(ball(one), tracked, 0.8, 0.95, 1e-2)
            assert worst(before[i], expected) <= 1e-6
            # the noise of the gradient itself, taken for that of the momentum, is wrong
            forgotten = reference.adambc(ball(one), noise, 0.8, 0.95, 1e-2)
            assert worst(before[i], forgotten) > 1e-3
            swapped = ball(reference.adambc(one, noise, 0.8, 0.95, 1e-2))
            assert worst(after[i], swapped) <= 1e-6
    assert second[0].noise_variance is None  # not linear: nobody knows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_averages_of_iterates(dtype, seed):
    iterates = [g.values for g in sequence(STEPS, seed, dtype)]
    rules = {
        ExponentialAverage(0.9): partial(reference.exponential_average, beta=0.9),
        ExponentialAverage(0.0): lambda x: x,
        TailAverage(0): partial(reference.tail_average, start=0),
        TailAverage(25): partial(reference.tail_average, start=25),
        TailAverage(1000): lambda x: x,
    }
    for transform, slow in rules.items():
        state = transform.init(parameters(dtype))
        found = []
        for before, after in zip([iterates[0], *iterates], iterates, strict=False):
            state = transform.stepped(before, after, state)
            found.append(transform.averaged(state))
        for parameter, shape in SHAPES.items():
            inputs = coordinates(iterates, parameter, shape)
            mine = coordinates(found, parameter, shape)
            for one, other in zip(inputs, mine, strict=True):
                assert worst(other, slow(one)) <= 1e-6


@pytest.mark.parametrize(
    "transform",
    [
        Momentum(),
        Momentum(nesterov=True),
        AdamBC(),
        KalmanFilter(),
        KalmanFilter(0.5, 0.3),
        ExponentialAverage(),
        TailAverage(1),
        Chain((Momentum(), AdamBC(), TailAverage())),
    ],
    ids=repr,
)
def test_transforms_conform(transform):
    generator = torch.Generator().manual_seed(0)
    like = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    check_transform(transform, like)


# -- DiSK, with its look ahead ---------------------------------------------------------


def slope(x):
    """Of a loss that is not quadratic, so that it matters where it is taken."""
    return x**3 - 0.5 * x


def disk(x, rate, kappa, gamma, noises):
    """The method as published, on one coordinate."""
    c = (1 - kappa) / (kappa * gamma)
    before, m, found = x, None, []
    for z in noises:
        dx = x - before
        g = c * slope(x + gamma * dx) + (1 - c) * slope(x) + z
        m = g if m is None else (1 - kappa) * m + kappa * g
        before, x = x, x - rate * m
        found.append(x)
    return found


@pytest.mark.parametrize("kappa", [0.3, 0.7])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_disk_takes_gradients_ahead(kappa, gamma):
    chain = Chain((KalmanFilter(kappa, gamma),))
    generator = torch.Generator().manual_seed(2)
    noises = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    state = chain.init({"x": x}, look_ahead=True)
    found = []
    for z in noises:
        ahead = chain.look_ahead(state)
        assert (ahead.weight == 1) == (gamma == 0)
        c = ahead.weight
        g = c * slope(x + ahead.offsets["x"]) + (1 - c) * slope(x) + z
        gradient, state = chain.update(Gradient({"x": g}), state)
        after = x - 0.1 * gradient.values["x"]
        state = chain.stepped({"x": x}, {"x": after}, state)
        x = after
        found.append(x.tolist())
    for i, start in enumerate(torch.linspace(-1, 1, 5, dtype=torch.float64).tolist()):
        gone = gamma or (1 - kappa) / kappa
        expected = disk(start, 0.1, kappa, gone, noises[:, i].tolist())
        assert worst([row[i] for row in found], expected) <= 1e-6


def test_a_distance_with_one_gradient_needs_one():
    assert KalmanFilter(0.7, (1 - 0.7) / 0.7).weight == 1
    assert KalmanFilter(0.8, 0.25).weight == 1
    assert KalmanFilter(0.8, 0.5).weight == pytest.approx(0.5)
    assert Chain((KalmanFilter(1.0),)).look_ahead([{}]) is None


def test_a_filter_that_looks_ahead_is_refused_where_nobody_does():
    chain = Chain((KalmanFilter(),))
    with pytest.raises(ConfigurationError, match="looks ahead"):
        chain.init(parameters())
    chain.init(parameters(), look_ahead=True)
    nested = Chain((chain, Momentum()))
    with pytest.raises(ConfigurationError, match="looks ahead"):
        nested.init(parameters())
    nested.init(parameters(), look_ahead=True)
    Chain((KalmanFilter(1.0),)).init(parameters())  # kappa 1 is no filter
    with pytest.raises(ConfigurationError, match="both say"):
        Chain((KalmanFilter(), KalmanFilter()))


# -- settings that make no sense -------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Momentum(1.0), "mu"),
        (lambda: Momentum(-0.1), "mu"),
        (lambda: AdamBC(beta1=1.0), "beta1"),
        (lambda: AdamBC(beta2=float("nan")), "beta2"),
        (lambda: AdamBC(floor=0.0), "floor"),
        (lambda: KalmanFilter(0.0), "kappa"),
        (lambda: KalmanFilter(1.1), "kappa"),
        (lambda: KalmanFilter(0.5, -1.0), "gamma"),
        (lambda: ExponentialAverage(1.0), "average_decay"),
        (lambda: TailAverage(-1), "average_from"),
        (lambda: TailAverage(0.5), "average_from"),
    ],
)
def test_settings_without_sense_are_refused_by_name(make, name):
    with pytest.raises(ConfigurationError, match=name):
        make()
