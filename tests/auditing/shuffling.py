"""An attack that tells shuffled batches from Poisson samples.

All other examples pull one way and the canary the other way, each with length C. A
shuffled pass over N = T b examples has sums of -b C but in the batch with the canary,
where it is -b C + 2 C. Without the canary the last batch is one short: -b C + C. So
both worlds show where the odd batch is, and nothing is left of amplification by
sampling. Poisson samples hide it among batches of all sizes. The parameters stay where
they are, so that a sum depends on two counts alone and is computed once.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.auditing.audit import claim_of
from curvedp.auditing.witness import next_sum
from curvedp.noise import NoiseState, RandomStreams

BATCH = 5
#: Log likelihood ratio from which on the attacker says yes; chosen by simulation.
THRESHOLD = 2.5


def attached(label, steps=1, **settings):
    """A run whose only example pulls one way."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.full((1, 1), 1e3), torch.tensor([label]))
    return make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), data, loss="cross-entropy",
        steps=steps, expected_batch_size=BATCH, allow_large_delta=True, **settings,
    )  # fmt: skip


class Frozen:
    """Runs of the engine's sampler, sums and noise at fixed parameters: one pass."""

    def __init__(self, steps, noise_multiplier, delta):
        options = {"noise_multiplier": noise_multiplier, "delta": delta}
        # before a fault is planted into the sampler, everybody is in at rate 1
        self.other, self.canary = (
            next_sum(attached(label, sample_rate=1.0, **options)) for label in (1, 0)
        )
        self.plan = attached(0, steps, sample_rate=1 / steps, **options).plan
        self.claim = claim_of(self.plan)
        flat = self.canary.values["weight"].double()
        self.direction = flat / flat.norm() ** 2
        self.none = self.canary.merge(self.other)  # they cancel
        self.totals = {}

    def total(self, others, with_canary):
        key = others, with_canary
        if key not in self.totals:
            total = self.none
            for _ in range(others):
                total = total.merge(self.other)
            self.totals[key] = total.merge(self.canary) if with_canary else total
        return self.totals[key]

    def run(self, included, seed):
        """Projections of all releases on the canary's direction, in units of C."""
        plan = self.plan.sampling
        streams = RandomStreams(0, unsafe_reproducible_noise=seed)
        sampler = streams.sampler(plan.sample_rate, lambda step: [step])
        mechanism = self.plan.mechanism()
        others, seen = BATCH * plan.steps - 1, []
        for step in range(plan.steps):
            drawn = sampler.draw(step, others + included)
            inside = bool((drawn == others).any())
            total = self.total(len(drawn) - inside, inside)
            release, _ = mechanism.update(total, NoiseState(streams, step))
            value = release.values["weight"].double()
            seen.append(float((value * self.direction).sum()))
        return np.array(seen)

    def score(self, seen):
        """Log likelihood ratio: +2 in any batch against +1 in the last one."""
        above, variance = seen + BATCH, self.plan.noise_multiplier**2
        anywhere = np.logaddexp.reduce((2 * above - 2) / variance)
        return anywhere - math.log(len(seen)) - (above[-1] - 0.5) / variance

    def scores(self, runs):
        """Of runs with the canary and of runs without it."""
        return [
            [self.score(self.run(included, 2 * k + included)) for k in range(runs)]
            for included in (True, False)
        ]
