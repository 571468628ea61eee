"""An audit of one step: how well can two neighbours be told apart from a release?

Whoever knows everything but the noise projects a release on the difference of the two
sums. Of ``N(m, v)`` against ``N(m', v)`` no test says more, and the pair's epsilon
follows from ``mu = |m - m'| / sqrt(v)``. Both sums are computed once; the releases are
many, each by the run's own mechanism with fresh noise. At sampling rate 1 and one step
the claim is about this very pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvedp.auditing.bounds import CONFIDENCE, Rates, epsilon_of_mu, mu_at
from curvedp.barrier import ClippedSum
from curvedp.errors import ConfigurationError
from curvedp.noise import Mechanism, NoiseState, RandomStreams

__all__ = ["StepAudit", "audit_step"]


@dataclass(frozen=True)
class StepAudit:
    """What many releases of two neighbouring sums prove about one step.

    Attributes:
        epsilon_lower: epsilon is at least this, with ``confidence``.
        epsilon_estimated: the likeliest epsilon, for a look at how tight the pair is.
        distance: of the two sums.
        rates: counts behind the bound.
        confidence: of the bound.
    """

    epsilon_lower: float
    epsilon_estimated: float
    distance: float
    rates: Rates
    confidence: float


def audit_step(
    mechanism: Mechanism,
    sums: Sequence[ClippedSum],
    delta: float,
    *,
    releases: int = 2000,
    confidence: float = CONFIDENCE,
    unsafe_reproducible_noise: int | None = None,
) -> StepAudit:
    """Lower bound on the epsilon of a step at sampling rate 1, from its own noise.

    Args:
        mechanism: of the run.
        sums: of the two neighbours, in the same frame.
        delta: of (epsilon, delta).
        releases: of each sum.
        confidence: of the bound.
        unsafe_reproducible_noise: makes the noise reproducible, for tests.

    Raises:
        ConfigurationError: the sums are equal or cannot be compared.
    """
    without, with_it = sums
    if without.frame != with_it.frame:
        raise ConfigurationError(
            "the two sums stand in different frames",
            "give both runs the same public seed, and the same past",
        )
    flat = [_flat(own.values) for own in sums]
    distance = float((flat[1] - flat[0]).norm())
    if not distance:
        raise ConfigurationError(
            "the two sums are equal: nothing tells the neighbours apart",
            "choose neighbours that differ in an example with a gradient",
        )
    direction = (flat[1] - flat[0]) / distance
    # the attacker knows both sums, so the middle needs no choosing
    middle = float((flat[0] + flat[1]) @ direction) / 2
    scores = []
    for i, own in enumerate(sums):
        noise = unsafe_reproducible_noise
        streams = RandomStreams(
            0, unsafe_reproducible_noise=None if noise is None else 2 * noise + i
        )
        drawn = [
            mechanism.update(own, NoiseState(streams, attempt))[0]
            for attempt in range(releases)
        ]
        scores.append(np.array([float(_flat(r.values) @ direction) for r in drawn]))
    rates = Rates(
        int((scores[1] > middle).sum()),
        releases,
        int((scores[0] > middle).sum()),
        releases,
    )
    spread = math.sqrt((scores[0].var() + scores[1].var()) / 2)
    return StepAudit(
        epsilon_of_mu(mu_at(rates, confidence), delta),
        epsilon_of_mu(abs(scores[1].mean() - scores[0].mean()) / spread, delta),
        distance,
        rates,
        confidence,
    )


def _flat(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([v.detach().double().flatten().cpu() for v in values.values()])
