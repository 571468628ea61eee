"""Correlated noise: its law, its blocks, and that its state stays secret."""

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from curvedp.barrier import IDENTITY_FRAME, ClippedSum
from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise import CorrelatedMechanism, RandomStreams
from curvedp.noise.strategies import (
    Banded,
    Identity,
    PrefixSums,
    optimise_banded,
    optimise_blt,
    optimise_toeplitz,
)
from curvedp.testing import check_mechanism

STEPS, BANDS = 12, 4
STRATEGIES = {
    "identity": Identity(STEPS),
    "banded": optimise_banded(PrefixSums(), STEPS, BANDS),
    "toeplitz": optimise_toeplitz(PrefixSums(), STEPS, BANDS),
    "blt": optimise_blt(PrefixSums(), STEPS, 2),
}
KEEPING = ["buffer", "regenerate"]
DRAWS = 20_000


def mechanism(strategy=STRATEGIES["banded"], keep="buffer", s=2.0, bound=0.5):
    return CorrelatedMechanism(s, bound, strategy, keep)


def sums(step, *, width=DRAWS, frame=IDENTITY_FRAME, bound=0.5):
    values = {"w": torch.zeros(width), "b": torch.zeros(3)}
    return ClippedSum(values, bound, frame, step)


def streams(seed=0):
    return RandomStreams(0, unsafe_reproducible_noise=seed)


def run(own, state, steps, **kwargs):
    """Releases' noise ``[steps, width]`` and the state after them."""
    rows = []
    for step in steps:
        release, state = own.update(sums(step, **kwargs), state)
        rows.append(release)
    return rows, state


def noise_of(releases):
    return torch.stack([r.values["w"] for r in releases]).double().numpy()


@pytest.mark.parametrize("keep", KEEPING)
@pytest.mark.parametrize("kind", STRATEGIES)
class TestLaw:
    def test_it_passes_the_suite_for_mechanisms(self, kind, keep):
        own = mechanism(STRATEGIES[kind], keep, s=1.5, bound=2.0)
        first = float(STRATEGIES[kind].inverse_row_norms()[0])
        check_mechanism(own, bound=2.0, noise_std=3.0 * first)

    def test_it_has_the_covariance_of_the_inverse(self, kind, keep):
        own = mechanism(STRATEGIES[kind], keep)
        releases, _ = run(own, own.init(streams(1)), range(STEPS))
        found = noise_of(releases)
        inverse = np.linalg.inv(STRATEGIES[kind].materialize())
        covariance = inverse @ inverse.T  # of unit scale: s C = 1
        spread = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
        error = np.abs(found @ found.T / DRAWS - covariance) / spread
        assert error.max() < 5 * math.sqrt(2 / DRAWS)
        for step, release in enumerate(releases):
            assert release.noise_std == pytest.approx(math.sqrt(covariance[step, step]))

    def test_it_is_normal_and_independent_again_under_the_strategy(self, kind, keep):
        own = mechanism(STRATEGIES[kind], keep)
        releases, _ = run(own, own.init(streams(2)), range(STEPS))
        found = noise_of(releases)
        z = STRATEGIES[kind].materialize() @ found
        for step in range(STEPS):
            std = releases[step].noise_std
            assert scipy.stats.kstest(found[step] / std, "norm").pvalue > 1e-4
            assert scipy.stats.kstest(z[step], "norm").pvalue > 1e-4
        assert np.abs(np.corrcoef(z) - np.eye(STEPS)).max() < 5 / math.sqrt(DRAWS)


class TestMemory:
    @pytest.mark.parametrize("kind", STRATEGIES)
    def test_regenerated_noise_is_the_same_noise(self, kind):
        kept, again = (
            noise_of(run(own, own.init(streams(3)), range(STEPS), width=50)[0])
            for own in (mechanism(STRATEGIES[kind], k) for k in KEEPING)
        )
        assert kept == pytest.approx(again, abs=2e-5)

    def test_regenerated_noise_remembers_no_noise(self):
        own = mechanism(keep="regenerate")
        _, state = run(own, own.init(streams(3)), range(5), width=50)
        assert state.memory is None

    def test_the_buffer_has_one_vector_less_than_bands(self):
        own = mechanism()
        _, state = run(own, own.init(streams(3)), range(9), width=50)
        assert len(state.memory["w"]) == BANDS - 1

    @pytest.mark.parametrize("keep", KEEPING)
    @pytest.mark.parametrize("kind", STRATEGIES)
    def test_a_resumed_block_goes_on_as_if_nothing_had_been(self, kind, keep):
        own = mechanism(STRATEGIES[kind], keep)
        whole = noise_of(run(own, own.init(streams(4)), range(STEPS), width=50)[0])
        secret = streams(4).reveal_secret()
        fresh = RandomStreams(0)
        fresh.continue_run(secret, dict.fromkeys(range(7), secret))
        state = own.resumed(fresh, range(7), IDENTITY_FRAME)
        releases, _ = run(own, state, range(7, STEPS), width=50)
        # z of the steps before, and new z of its own: nothing is drawn twice
        z = own.strategy.materialize() @ np.concatenate([whole[:7], noise_of(releases)])
        before = own.strategy.materialize() @ whole
        assert z[:7] == pytest.approx(before[:7], abs=1e-5)
        assert np.abs(z[7:] - before[7:]).min(axis=1).max() > 1e-5
        fresh = RandomStreams(0)
        fresh.continue_run(secret, {})
        new = [fresh.standard_normals([torch.zeros(50)], 0, 0)[0] for _ in range(1)]
        assert not np.allclose(new[0], before[0])
        unbroken = own.init(streams(4))
        for step in range(7):
            _, unbroken = own.update(sums(step, width=50), unbroken)
        then, _ = own.update(sums(7, width=50), unbroken)
        assert releases[0].noise_std == then.noise_std

    def test_streams_that_have_drawn_take_no_other_secret(self):
        used = RandomStreams(0)
        used.standard_normals([torch.zeros(2)], 0, 0)
        with pytest.raises(CurvedpError, match="drawn noise"):
            used.continue_run(5, {})

    def test_noise_is_drawn_once(self):
        own, shared = mechanism(), streams(5)
        run(own, own.init(shared), range(3), width=5)
        with pytest.raises(CurvedpError, match="drawn before"):
            own.update(sums(2, width=5), own.init(shared))


class TestSecret:
    def test_the_state_is_not_printed_copied_or_pickled(self):
        own = mechanism()
        _, state = run(own, own.init(streams()), range(3), width=5)
        assert "tensor" not in repr(state) and "secret" in repr(state)
        for copying in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(CurvedpError, match="secret"):
                copying(state)

    def test_a_checkpoint_cannot_hold_it(self):
        from curvedp.train.encoding import encode_state

        own = mechanism()
        _, state = run(own, own.init(streams()), range(3), width=5)
        with pytest.raises(Exception, match=r"CorrelatedState|store"):
            encode_state({"noise": state}, {})

    def test_with_the_state_a_release_is_the_sum(self):
        # why it is a secret: the noise of the last step is in it
        own = mechanism()
        values = {"w": torch.arange(5.0), "b": torch.zeros(3)}
        release, state = own.update(
            ClippedSum(values, 0.5, IDENTITY_FRAME, 0), own.init(streams())
        )
        noise = own.noise_multiplier * own.bound * state.memory["w"][0]
        assert release.values["w"] - noise == pytest.approx(torch.arange(5.0))


def linear_map(own, frames, carry=None):
    """The whole mechanism as a matrix: from all z to all noise, one z at a time.

    Args:
        own: mechanism with s C = 1 on sums of 2 coordinates.
        frames: of every step.
        carry: makes the mistake of taking the memory along, through this matrix.
    """
    steps, width = len(frames), 2

    class OneAtATime(RandomStreams):
        def __init__(self, place):
            super().__init__(0)
            self.place = place

        def standard_normals(self, values, *at, again=False):
            unit = torch.zeros(steps * width, dtype=torch.float64)
            unit[self.place] = 1.0
            return [unit[at[0] * width : at[0] * width + width].clone()]

    columns = []
    for place in range(steps * width):
        state, rows = own.init(OneAtATime(place)), []
        for step, frame in enumerate(frames):
            if carry is not None and state.drawn and frame != state.frame:
                taken = {
                    name: tuple(carry @ x for x in memory)
                    for name, memory in state.memory.items()
                }
                state = replace(state, frame=frame, memory=taken)
            zero = {"w": torch.zeros(width, dtype=torch.float64)}
            release, state = own.update(ClippedSum(zero, 1.0, frame, step), state)
            rows.append(release.values["w"])
        columns.append(torch.cat(rows).numpy())
    return np.stack(columns, axis=1)


def mahalanobis(noise_map, steps_of_one, width=2):
    """Largest ``||Sigma^-1/2 d||`` over unit contributions of one example."""
    whitening = np.linalg.inv(noise_map)
    best = 0.0
    for angles in np.random.default_rng(0).uniform(0, 2 * np.pi, (200, 12)):
        d = np.zeros(len(noise_map))
        for step, angle in zip(steps_of_one, angles, strict=False):
            d[step * width : step * width + width] = np.cos(angle), np.sin(angle)
        best = max(best, np.linalg.norm(whitening @ d))
    return best


class TestBlocks:
    # a participation every four steps: three events of sensitivity 1
    PATTERN = (1, 5, 9)
    ALLOWED = math.sqrt(3)

    def exact(self, frames, carry=None):
        own = mechanism(s=1.0, bound=1.0)
        return mahalanobis(linear_map(own, frames, carry), self.PATTERN)

    def test_within_a_frame_an_example_does_what_is_paid_for(self):
        assert self.exact(["a"] * STEPS) == pytest.approx(self.ALLOWED)

    def test_across_a_refresh_it_does_no_more(self):
        frames = ["a"] * 7 + ["b"] * 5
        assert self.exact(frames) <= self.ALLOWED * (1 + 1e-9)

    def test_noise_carried_through_a_new_whitener_would_let_it_do_more(self):
        # P_new P_old^-1 of norm 3: the third column reaches into the new frame
        frames = ["a"] * 7 + ["b"] * 5
        stretched = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
        assert self.exact(frames, stretched) > 1.1 * self.ALLOWED

    def test_a_refresh_begins_a_block(self):
        own = mechanism()
        releases, state = run(own, own.init(streams(6)), range(5))
        more, state = run(own, state, range(5, 8), frame="b")
        assert state.start == 5
        found = noise_of(releases + more)
        expected = np.zeros((8, 8))
        expected[:5, :5] = own.strategy.inverse(0, 5)
        expected[5:, 5:] = own.strategy.inverse(5, 8)
        covariance = expected @ expected.T
        assert np.abs(found @ found.T / DRAWS - covariance).max() < 0.06
        assert more[0].noise_std == pytest.approx(expected[5, 5])

    def test_a_rewind_begins_a_block(self):
        own, shared = mechanism(), streams(7)
        releases, state = run(own, own.init(shared), range(6))
        again, state = own.update(sums(4), replace(state, attempt=1))
        assert state.start == 4 and state.drawn == ((4, 1),)
        lost = releases[4].values["w"].double().numpy()
        fresh = again.values["w"].double().numpy()
        for other in (lost, *noise_of(releases[:4])):
            assert abs(np.corrcoef(other, fresh)[0, 1]) < 5 / math.sqrt(DRAWS)

    def test_a_step_left_out_begins_a_block(self):
        own = mechanism()
        _, state = run(own, own.init(streams(8)), (0, 1, 3), width=5)
        assert state.start == 3


class TestRefusals:
    def test_a_larger_bound(self):
        own = mechanism()
        with pytest.raises(ConfigurationError, match="bounded by"):
            own.update(sums(0, bound=0.6), own.init(streams()))

    def test_a_step_beyond_the_design(self):
        own = mechanism()
        with pytest.raises(ConfigurationError, match="designed for 12 steps"):
            own.update(sums(STEPS, width=5), own.init(streams()))

    def test_another_way_of_keeping(self):
        with pytest.raises(ConfigurationError, match="buffer, regenerate"):
            mechanism(keep="disk")

    def test_columns_that_are_too_long(self):
        own = Banded(np.full((2, 8), math.sqrt(0.5)))
        object.__setattr__(own, "_columns", np.full((2, 8), 0.8))
        with pytest.raises(ConfigurationError, match="column"):
            mechanism(own)
