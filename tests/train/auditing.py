"""A Gaussian white-box audit: how well can two neighbours be told from a release?

Whoever knows everything but the noise projects a release on the difference of the two
sums. Under ``N(m, v)`` against ``N(m', v)`` no test beats that, and the pair's epsilon
follows from ``mu = |m - m'| / sqrt(v)``. The audit measures mu from many releases of
the run's own mechanism. At sampling rate 1 and one step the claim is about this pair.
"""

import math

import torch
from scipy.optimize import brentq
from scipy.stats import norm

from curvedp.noise import NoiseState, RandomStreams

#: Standard errors between the estimate of mu and the lower bound.
CONFIDENCE = 4.0


def epsilon_of_mu(mu, delta):
    """Of a pair of Gaussians at distance mu: exact, in log space."""

    def excess(epsilon):
        tail = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return norm.cdf(mu / 2 - epsilon / mu) - tail - delta

    return 0.0 if excess(0.0) <= 0 else brentq(excess, 0.0, 50 * mu + mu**2)


def first_sum(private):
    """The pending sum of the next step."""
    engine = private._engine
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        if engine.accumulate():
            break
    return engine._open.pending


def audit(mechanism, sums, delta, releases=2000, seed=0):
    """Lower bound on epsilon, and the estimate, from releases of both sums."""
    flat = [_flat(s.values) for s in sums]
    direction = flat[1] - flat[0]
    direction = direction / direction.norm()
    scores = []
    for i, pending in enumerate(sums):
        streams = RandomStreams(0, unsafe_reproducible_noise=2 * seed + i)
        drawn = [
            mechanism.update(pending, NoiseState(streams, attempt))[0]
            for attempt in range(releases)
        ]
        scores.append(torch.stack([_flat(r.values) @ direction for r in drawn]))
    gap = float(scores[1].mean() - scores[0].mean())
    spread = math.sqrt(float(scores[0].var() + scores[1].var()) / 2)
    mu = abs(gap) / spread
    error = math.sqrt(2 / releases + mu**2 / (4 * releases))
    least = max(mu - CONFIDENCE * error, 1e-6)
    return epsilon_of_mu(least, delta), epsilon_of_mu(mu, delta)


def _flat(values):
    return torch.cat([v.double().flatten() for v in values.values()])
