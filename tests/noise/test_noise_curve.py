"""Theorem 1 of NoiseCurve: the loss that correlated noise costs on a quadratic."""

import numpy as np
import pytest

from curvedp.noise.strategies import (
    Identity,
    NoiseCurve,
    PrefixSums,
    optimise_banded,
    optimise_toeplitz,
)
from curvedp.noise.strategies.optimise import LARGEST_STEP

STEPS, BANDS, RUNS, RATE = 40, 6, 24_000, 0.4
SPECTRA = {
    "power law": 2.0 / np.arange(1, 13) ** 1.2,
    "a bulk and outliers": np.array([3.0, 2.0, *[0.1] * 10]),
    "nearly flat": np.linspace(0.5, 1.5, 8),
}


def excess_loss(spectrum, strategy, seed):
    """Mean loss of noisy gradient descent over that without noise, by running it.

    Pairs of runs have opposite noise, so that what is linear in it drops out.
    """
    rng = np.random.default_rng(seed)
    p = len(spectrum)
    basis, _ = np.linalg.qr(rng.standard_normal((p, p)))
    hessian = basis * spectrum @ basis.T
    target = rng.standard_normal(p)
    quiet = rng.standard_normal(p)
    noisy = np.repeat(quiet[None], RUNS, axis=0)
    memory = ()
    for step in range(STEPS):
        half = rng.standard_normal((RUNS // 2, p))
        noise, memory = strategy.next(np.concatenate([half, -half]), memory, step)
        noisy = noisy - RATE * ((noisy - target) @ hessian + noise)
        quiet = quiet - RATE * (hessian @ (quiet - target))

    def loss(w):
        return 0.5 * np.einsum("...i,ij,...j", w - target, hessian, w - target)

    return float(np.mean(loss(noisy)) - loss(quiet))


def designs(spectrum):
    own = NoiseCurve.of(spectrum, RATE)
    return {
        "identity": Identity(STEPS),
        "prefix sums": optimise_banded(PrefixSums(), STEPS, BANDS),
        "noise curve": optimise_banded(own, STEPS, BANDS),
        "noise curve, toeplitz": optimise_toeplitz(own, STEPS, BANDS),
    }


@pytest.mark.parametrize("name", SPECTRA)
def test_the_measured_loss_is_that_of_the_theorem(name):
    spectrum = SPECTRA[name]
    last = NoiseCurve.of(spectrum, RATE, weight=0.0)
    for k, (which, strategy) in enumerate(designs(spectrum).items()):
        c = strategy.materialize()
        predicted = RATE**2 / 2 * np.trace(np.linalg.inv(c.T @ c) @ last.gram(STEPS))
        measured = excess_loss(spectrum, strategy, seed=k)
        assert measured == pytest.approx(predicted, rel=0.02), which


@pytest.mark.parametrize("name", SPECTRA)
def test_a_design_for_the_curvature_beats_one_for_prefix_sums(name):
    spectrum = SPECTRA[name]
    measured = {
        which: excess_loss(spectrum, strategy, seed=9)
        for which, strategy in designs(spectrum).items()
    }
    assert measured["noise curve"] < 0.97 * measured["prefix sums"]
    assert measured["prefix sums"] < 0.97 * measured["identity"]
    assert measured["noise curve"] <= 1.01 * measured["noise curve, toeplitz"]


def test_without_the_other_ends_the_noise_of_a_step_explodes():
    # one small eigenvalue: the theorem alone wants noise that cancels in the last step
    bare, regular = (
        optimise_banded(NoiseCurve.of([0.05], RATE, weight=w), STEPS, 12)
        for w in (0.0, 0.01)
    )
    assert regular.inverse_row_norms().max() < 10
    assert 50 < bare.inverse_row_norms().max() <= LARGEST_STEP
    assert bare.column_norms().max() <= 1 + 1e-9
