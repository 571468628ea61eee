"""Audits where steps share noise: the statistic, below the claim, and its teeth."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from curvedp.auditing import audit_worst_case
from curvedp.auditing.correlated import SeenStep, joint_ratios
from curvedp.noise import CorrelatedMechanism

QUICK = {"epsilon": 2.0, "canaries": 250, "runs": 2, "unsafe_reproducible_noise": 5}


@dataclass
class Written:
    """Directions that are written down, ``[B, d]``."""

    rows: torch.Tensor

    @property
    def ios(self):
        return [SimpleNamespace(batch_size=len(self.rows))]

    def projections(self, residual):
        return self.rows @ residual["w"]

    def sq_norms(self):
        return self.rows.square().sum(1)


def banded(steps, bands, random):
    """A lower triangular matrix with so many bands and columns of length 1."""
    matrix = np.tril(random.normal(size=(steps, steps)))
    matrix -= np.tril(matrix, -bands)
    matrix += 2 * np.eye(steps)
    return matrix / np.linalg.norm(matrix, axis=0)


@pytest.mark.parametrize("frames", ["aaaaaa", "aaabbb", "aabbbb"])
@pytest.mark.parametrize("bands", [1, 2, 3])
def test_scores_are_those_of_the_undone_correlation(frames, bands):
    random = np.random.default_rng(0)
    count, size, std, rate = 4, 5, 0.7, 0.3
    matrix = banded(6, bands, random)
    rows = torch.from_numpy(random.normal(size=(6, count, size)))
    residual = torch.from_numpy(random.normal(size=(6, size)))
    steps = [
        SeenStep({"w": residual[t]}, [[Written(rows[t, :2]), Written(rows[t, 2:])]], f)
        for t, f in enumerate(frames)
    ]
    strategy = SimpleNamespace(materialize=lambda: matrix)
    mechanism = SimpleNamespace(strategy=strategy, noise_multiplier=std, bound=1.0)
    (found,) = joint_ratios(steps, mechanism, bands, rate)

    # the slow twin: undo the correlation of each block, and add up densities
    whole = np.zeros_like(matrix)
    for frame in set(frames):
        own = [t for t in range(6) if frames[t] == frame]
        whole[np.ix_(own, own)] = matrix[np.ix_(own, own)]
    undone = whole @ residual.numpy()
    for i in range(count):
        of_groups = []
        for group in range(bands):
            total = 0.0
            for t in range(group, 6, bands):
                added = np.outer(whole[:, t], rows[t, i].numpy())
                shift = ((undone * added).sum() - (added**2).sum() / 2) / std**2
                total += math.log(1 - rate + rate * math.exp(shift))
            of_groups.append(total)
        expected = np.logaddexp.reduce(of_groups) - math.log(bands)
        assert found[i] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("recipe", ["dp-bandmf", "noisecurve", "dp-kfc+noisecurve"])
def test_bounds_stay_below_the_claim_and_are_not_nothing(recipe):
    result = audit_worst_case(recipe, **QUICK)
    assert (result.claim.sample_rate, result.claim.steps) == (0.6, 5)
    assert f"{result.steps} steps, an example in 5 draws" in str(result)
    assert 0.2 * result.claim.epsilon < result.epsilon_lower < result.claim.epsilon


def test_halved_noise_is_found(monkeypatch):
    update = CorrelatedMechanism._buffered

    def halved(self, *given):
        noise, memory = update(self, *given)
        return [0.5 * x for x in noise], memory

    monkeypatch.setattr(CorrelatedMechanism, "_buffered", halved)
    result = audit_worst_case("dp-bandmf", **QUICK)
    assert result.epsilon_lower > 1.1 * result.claim.epsilon
