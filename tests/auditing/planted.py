"""Privacy faults planted into the running engine, for the auditor to find."""

import numpy as np
import torch

from curvedp.barrier import ClippedSum
from curvedp.noise import RandomStreams
from curvedp.sampling import PoissonSampler
from curvedp.train import engine


def halve_the_noise(monkeypatch):
    """Half of the noise is drawn, and all of it reported."""
    honest = RandomStreams.add_gaussian

    def weak(self, values, multiplier, bound, *at):
        noisy, std = honest(self, values, multiplier / 2, bound, *at)
        return noisy, 2 * std

    monkeypatch.setattr(RandomStreams, "add_gaussian", weak)


def clip_after_summing(monkeypatch):
    """The sum of whole gradients is cut to C, and no example is."""

    def wrong(ios, rule, whitener, *, parameters, present, step, scale=1.0, **_):
        ones = present.to(torch.float32) * scale
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for io in ios:
            for name, part in io.weighted_sum(ones).items():
                total[name] = total[name] + part
        length = torch.cat([v.flatten() for v in total.values()]).norm()
        cut = min(1.0, rule.bound / float(length)) if float(length) else 1.0
        values = {name: cut * v for name, v in total.items()}
        return ClippedSum(values, rule.bound, whitener.frame, step)

    monkeypatch.setattr(engine, "clipped_sum", wrong)


def shuffle(monkeypatch):
    """Every example once in each pass, batches of one size."""

    def draw(self, step, population):
        passes, place = divmod(step, round(1 / self.sample_rate))
        order = self.generator(10**6 + passes).permutation(population)
        size = round(self.sample_rate * population)
        return order[place * size : (place + 1) * size].astype(np.int64)

    monkeypatch.setattr(PoissonSampler, "draw", draw)
