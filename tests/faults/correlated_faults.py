"""Faults in correlated noise and in groups that take turns: rules 2, 7 and 11."""

from __future__ import annotations

import numpy as np
import torch

from curvedp.barrier import ClippedSum
from curvedp.errors import ConfigurationError
from curvedp.noise import CorrelatedMechanism, RandomStreams, Stream
from curvedp.noise.correlated import CorrelatedState
from curvedp.noise.strategies import Banded
from curvedp.noise.strategies.base import Strategy
from curvedp.plan import correlation
from curvedp.recipes import RECIPES, Recipe
from curvedp.sampling import CyclicSampler, PoissonSampler

from .cases import attach, examples
from .checking import refused
from .mutate import Fault, Patch

BANDS, STEPS = 2, 6


def strategy(length=1.0):
    """Two bands; columns of norm ``length``, but for the last."""
    return Banded(length * np.array([[0.8] * STEPS, [0.6] * STEPS]))


def an_example_takes_part_once_in_a_round():
    everybody = PoissonSampler(1.0, np.random.default_rng)
    sampler = CyclicSampler(everybody, 3, lambda: np.random.default_rng(5))
    drawn = np.concatenate([sampler.draw(step, 50) for step in range(3)])
    assert sorted(drawn) == list(range(50)), "somebody takes part twice in a round"


def groups_are_secret():
    groups = {
        tuple(RandomStreams(5).generator(Stream.GROUPS).integers(3, size=20))
        for _ in range(2)
    }
    assert len(groups) == 2, "groups follow from the public seed"


def the_rate_is_that_of_a_group():
    private = attach(
        examples(), recipe="dp-bandmf", bands=BANDS, rate=0.2, sample_rate=0.2
    )
    assert private.plan.event_rate == 0.4, "a group's members are drawn more often"
    sampler = private._engine._loader._sampler
    assert sampler.within.sample_rate == private.plan.event_rate


def a_whitener_that_moves_is_refused():
    recipe, moving = RECIPES["dp-kfc+noisecurve"], {"clamp": "matched", "rank": 0}
    refused(
        ConfigurationError,
        "another whitener of every step",
        lambda: recipe.configure(side="both", **moving),
    )


def noise_is_taken_back_in_its_own_frame():
    mechanism = CorrelatedMechanism(1.0, 1.0, strategy())
    nothing = {"w": torch.zeros(5)}

    def noise_of_the_second(frames):
        streams = RandomStreams(0, unsafe_reproducible_noise=3)
        state = mechanism.init(streams)
        for step, frame in enumerate(frames):
            release, state = mechanism.update(
                ClippedSum(nothing, 1.0, frame, step), state
            )
        return release.values["w"]

    streams = RandomStreams(0, unsafe_reproducible_noise=3)
    (fresh,) = streams.standard_normals([nothing["w"]], 1, 0)
    assert torch.allclose(noise_of_the_second("ab"), fresh / 0.8), (
        "noise of another frame is taken back"
    )
    assert not torch.allclose(noise_of_the_second("aa"), fresh / 0.8)


def long_columns_are_refused():
    CorrelatedMechanism(1.0, 1.0, strategy())
    refused(
        ConfigurationError,
        "could contribute more",
        lambda: CorrelatedMechanism(1.0, 1.0, strategy(1.1)),
    )


FAULTS = [
    Fault(
        "2 the same group at every step",
        an_example_takes_part_once_in_a_round,
        (Patch(CyclicSampler.members, "[step % self.groups]", "[0]"),),
    ),
    Fault(
        "2 a group accounted at the rate of all",
        the_rate_is_that_of_a_group,
        (
            Patch(
                correlation.group_rate,
                "bands * sampling.sample_rate",
                "sampling.sample_rate",
            ),
        ),
    ),
    Fault(
        "2 a strategy with long columns",
        long_columns_are_refused,
        (
            Patch(
                Strategy.check, "if not largest <= 1 + COLUMN_TOLERANCE:", "if False:"
            ),
        ),
    ),
    Fault(
        "7 noise taken back in another frame",
        noise_is_taken_back_in_its_own_frame,
        (
            Patch(
                CorrelatedState.follows,
                "(self.drawn[-1][0] + 1, self.frame) == (step, frame)",
                "self.drawn[-1][0] + 1 == step",
            ),
        ),
    ),
    Fault(
        "7 a whitener of its own for every step of a block",
        a_whitener_that_moves_is_refused,
        (Patch(Recipe._check_correlation, "self.curvature.moves", "False"),),
    ),
    Fault(
        "11 groups from the public seed",
        groups_are_secret,
        (Patch(RandomStreams._sequence, "= self._groups", "= self.seed"),),
    ),
]
