"""Strategies: what their columns promise, what they cost, and that they stream."""

import itertools
import math

import numpy as np
import pytest
import torch

from curvedp.errors import ConfigurationError
from curvedp.noise.strategies import (
    Banded,
    BandedToeplitz,
    BufferedToeplitz,
    Identity,
    Momentum,
    NoiseCurve,
    Participation,
    PrefixSums,
    Schedule,
    Tail,
    optimise_banded,
    optimise_blt,
    optimise_toeplitz,
    reversed_cholesky,
    workload_from_json,
)
from curvedp.noise.strategies.participation import pattern_sensitivity
from curvedp.testing import check_strategy
from curvedp.testing.noise import dense_optimum, largest_pattern

STEPS, BANDS = 24, 4
SPECTRUM = NoiseCurve.of([2.0, 1.0, 1.0, 0.3, 0.1, 0.02, -0.5], 0.5)
WORKLOADS = {
    "prefix": PrefixSums(),
    "momentum": Momentum(0.9),
    "schedule": Schedule(tuple(np.linspace(1, 0.1, STEPS)), 0.5),
    "noisecurve": SPECTRUM,
}


def banded_gram(strategy):
    c = strategy.materialize()
    return c.T @ c


@pytest.fixture(scope="module")
def strategies():
    return {
        "identity": Identity(STEPS),
        "banded": optimise_banded(PrefixSums(), STEPS, BANDS),
        "blocks": optimise_banded(PrefixSums(), STEPS, BANDS, block=10),
        "toeplitz": optimise_toeplitz(PrefixSums(), STEPS, BANDS),
        "blt": optimise_blt(PrefixSums(), STEPS, 2),
    }


KINDS = ["identity", "banded", "blocks", "toeplitz", "blt"]


@pytest.mark.parametrize("kind", KINDS)
class TestEveryStrategy:
    def test_it_passes_the_suite_for_strategies(self, strategies, kind):
        check_strategy(strategies[kind])

    def test_streaming_is_the_inverse(self, strategies, kind):
        own = strategies[kind]
        inverse = np.linalg.inv(own.materialize())
        assert own.inverse() == pytest.approx(inverse, abs=1e-10)
        assert own.inverse_row_norms() == pytest.approx(np.linalg.norm(inverse, axis=1))
        z = torch.randn(STEPS, 3, generator=torch.Generator().manual_seed(0)).double()
        memory, rows = (), []
        for step in range(STEPS):
            x, memory = own.next(z[step], memory, step)
            assert len(memory) <= own.memory
            rows.append(x)
        assert torch.stack(rows).numpy() == pytest.approx(inverse @ z.numpy())

    def test_a_block_is_the_strategy_of_the_steps_that_are_left(self, strategies, kind):
        own = strategies[kind]
        rest = own.materialize()[7:, 7:]
        assert own.inverse(7) == pytest.approx(np.linalg.inv(rest), abs=1e-10)
        assert own.inverse_row_norms(7) == pytest.approx(
            np.linalg.norm(np.linalg.inv(rest), axis=1)
        )

    def test_it_begins_like_its_first_steps(self, strategies, kind):
        own = strategies[kind]
        assert np.array_equal(own.materialize(5), own.materialize()[:5, :5])

    def test_its_digest_tells_matrices_apart(self, strategies, kind):
        others = [s.digest() for k, s in strategies.items() if k != kind]
        assert strategies[kind].digest() not in others


def test_the_suite_finds_what_is_broken():
    own = optimise_banded(PrefixSums(), STEPS, BANDS)

    class Forgetful(Banded):
        def next(self, noise, memory, step):
            x, memory = super().next(noise, memory, step)
            return x, memory[:-1]

    class Long(Banded):
        def materialize(self, steps=None):
            return 1.01 * super().materialize(steps)

    for kind, said in ((Forgetful, "inverse"), (Long, "norm")):
        with pytest.raises(AssertionError, match=said):
            check_strategy(kind(own.arrays()["columns"]))


class TestReversedCholesky:
    def test_it_has_the_gram_matrix_and_unit_columns(self):
        gram = banded_gram(optimise_banded(PrefixSums(), STEPS, BANDS))
        band = np.stack(
            [np.append(np.diagonal(gram, -d), np.zeros(d)) for d in range(BANDS)]
        )
        columns = reversed_cholesky(band)
        assert np.linalg.norm(columns, axis=0) == pytest.approx(1.0)
        assert banded_gram(Banded(columns)) == pytest.approx(gram)

    def test_a_plain_cholesky_factor_is_caught(self):
        gram = banded_gram(optimise_banded(PrefixSums(), STEPS, BANDS))
        plain = np.linalg.cholesky(gram)  # L L^T: unit rows
        assert np.linalg.norm(plain, axis=1) == pytest.approx(1.0)
        columns = np.stack(
            [np.append(np.diagonal(plain, -d), np.zeros(d)) for d in range(BANDS)]
        )
        with pytest.raises(ConfigurationError, match="column of the noise strategy"):
            Banded(columns)

    def test_a_column_just_too_long_is_caught(self):
        columns = np.full((2, 8), math.sqrt(0.5))
        Banded(columns)
        with pytest.raises(ConfigurationError, match="column of the noise strategy"):
            Banded(columns * (1 + 2e-9))


class TestSensitivity:
    @pytest.mark.parametrize("separation", [1, 2, 3, 5, 12])
    @pytest.mark.parametrize("most", [1, 2, 4, None])
    def test_every_pattern_is_within_the_bound(self, separation, most):
        for bands, seed in itertools.product((1, 2, 3, 4, 6, 11), range(2)):
            rng = np.random.default_rng(seed)
            c = np.tril(np.triu(rng.standard_normal((11, 11)), 1 - bands))
            gram = c.T @ c
            participation = Participation(separation, most)
            exact = largest_pattern(gram, participation)
            bound = pattern_sensitivity(gram, bands, participation)
            assert bound >= exact * (1 - 1e-12)
            if bands <= 2 * separation:
                assert bound == pytest.approx(exact)

    def test_the_bound_is_reached_by_contributions_of_the_same_direction(self):
        own = optimise_banded(PrefixSums(), 12, 5)
        gram = banded_gram(own)
        assert (gram >= -1e-12).all()
        participation = Participation(3, 3)
        bound = own.sensitivity(participation)
        worst = max(
            np.linalg.norm(own.materialize()[:, list(p)].sum(axis=1))
            for p in itertools.combinations(range(12), 3)
            if p[1] - p[0] >= 3 and p[2] - p[1] >= 3
        )
        assert worst == pytest.approx(bound)

    def test_columns_a_band_apart_are_disjoint(self):
        own = optimise_banded(PrefixSums(), 300, 7)
        many = Participation(separation=7)
        assert own.sensitivity(many) == pytest.approx(math.sqrt(many.count(300)))
        assert own.sensitivity(Participation(6)) > math.sqrt(many.count(300))

    def test_dynamic_programming_agrees_with_a_slower_one_on_long_runs(self):
        own = optimise_toeplitz(PrefixSums(), 200, 6)
        gram = np.abs(banded_gram(own))
        # all patterns with 5 steps or more between: the last element is the state
        ending = gram.diagonal().copy()
        for j in range(200):
            for i in range(j - 4):
                ending[j] = max(ending[j], ending[i] + gram[j, j] + 2 * gram[i, j])
        assert own.sensitivity(Participation(5)) == pytest.approx(
            math.sqrt(ending.max())
        )


class TestWorkloads:
    def test_prefix_sums(self):
        a = np.tril(np.ones((6, 6)))
        assert PrefixSums().gram(6) == pytest.approx(a.T @ a)
        assert PrefixSums().root(6) == pytest.approx(a)

    def test_momentum_and_schedule_are_what_torch_adds_up(self):
        rates = (0.5, 0.4, 0.3, 0.2, 0.1)
        for workload, own in (
            (Momentum(0.7), (1.0,) * 5),
            (Schedule(rates, 0.7), rates),
        ):
            noise = torch.eye(5, dtype=torch.float64)  # of step t: unit vector t
            theta = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
            sgd = torch.optim.SGD([theta], lr=1.0, momentum=0.7)
            rows = []
            for step in range(5):
                sgd.param_groups[0]["lr"] = own[step]
                theta.grad = noise[step].clone()
                sgd.step()
                rows.append(-theta.detach().numpy().copy())
            a = np.stack(rows)
            assert workload.root(5) == pytest.approx(a)
            assert workload.gram(5) == pytest.approx(a.T @ a)

    def test_noise_curve_is_the_form_of_the_theorem_and_of_every_end(self):
        mu = np.array([2.0, 1.0, 1.0, 0.3, 0.1, 0.02])
        n, eta = 9, 0.5

        def form(end):
            v = np.zeros((len(mu), n))
            for j in range(end):
                v[:, j] = (1 - eta * mu) ** (end - j - 1)
            return v.T @ np.diag(mu) @ v

        assert NoiseCurve.of(mu, eta, weight=0.0).gram(n) == pytest.approx(form(n))
        every = sum(form(end) for end in range(1, n + 1))
        assert SPECTRUM.gram(n) == pytest.approx(form(n) + 0.01 / n * every)

    def test_a_tail_has_the_sum_of_its_eigenvalues(self):
        tail = Tail(count=5000, least=1e-4, slope=0.8, power=1.2)
        values, counts = tail.grouped(100)
        i = np.arange(101, 5001)
        curve = 1e-4 * np.exp(0.8 * (np.log(5000) - np.log(i)) ** 1.2)
        assert counts.sum() == len(i)
        assert (values * counts).sum() == pytest.approx(curve.sum())
        assert values[0] <= curve[0] and values[-1] >= 1e-4
        whole = NoiseCurve.of(np.concatenate([[3.0], curve]), 0.1).gram(20)
        groups = NoiseCurve.of(np.full(1, 3.0), 0.1, Tail(4901, 1e-4, 0.8, 1.2))
        assert len(groups.eigenvalues) < 250 and whole.shape == groups.gram(20).shape

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_they_are_stored_as_json(self, name):
        workload = WORKLOADS[name]
        assert workload_from_json(workload.to_json()) == workload

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_their_roots_are_roots(self, name):
        root = WORKLOADS[name].root(STEPS)
        gram = WORKLOADS[name].gram(STEPS)
        assert root.T @ root == pytest.approx(gram, rel=1e-8, abs=1e-10 * gram.max())

    def test_a_learning_rate_that_diverges_is_refused(self):
        with pytest.raises(ConfigurationError, match="diverges"):
            NoiseCurve.of([5.0], 0.5)


class TestOptimum:
    @pytest.mark.parametrize("name", WORKLOADS)
    def test_no_other_banded_matrix_is_better(self, name):
        workload = WORKLOADS[name]
        own = optimise_banded(workload, STEPS, BANDS)
        error = workload.error(own.inverse())
        assert error == pytest.approx(dense_optimum(workload, STEPS, BANDS), rel=1e-4)

    def test_across_blocks_there_is_nothing(self):
        own = optimise_banded(PrefixSums(), 70, 5, block=20)
        gram = banded_gram(own)
        for start in range(20, 70, 20):
            assert np.abs(gram[start:, :start]).max() < 1e-12
        free = optimise_banded(PrefixSums(), 70, 5)
        error = PrefixSums().error
        assert error(free.inverse()) < error(own.inverse()) < error(np.eye(70))

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_the_best_toeplitz_matrix_is_no_better_and_hardly_worse(self, name):
        workload = WORKLOADS[name]
        error = workload.error(optimise_toeplitz(workload, STEPS, BANDS).inverse())
        best = workload.error(optimise_banded(workload, STEPS, BANDS).inverse())
        assert best * (1 - 1e-9) <= error < 1.2 * best
        assert error < workload.error(np.eye(STEPS))

    def test_the_gradient_of_the_toeplitz_loss(self):
        from curvedp.noise.strategies.optimise import _toeplitz_loss

        for workload in WORKLOADS.values():
            loss = _toeplitz_loss(workload, STEPS, 5)
            at = np.array([0.5, 0.3, 0.2, 0.15])
            numeric = [
                (loss(at + h)[0] - loss(at - h)[0]) / 2e-6 for h in 1e-6 * np.eye(4)
            ]
            assert loss(at)[1] == pytest.approx(numeric, rel=1e-5)

    def test_more_buffers_come_close_to_the_best_full_toeplitz_matrix(self):
        full = PrefixSums().error(optimise_toeplitz(PrefixSums(), 200, 200).inverse())
        few, many = (
            PrefixSums().error(optimise_blt(PrefixSums(), 200, k).inverse())
            for k in (1, 4)
        )
        assert full * 0.999 < many < few
        assert many < 1.05 * full

    def test_buffers_for_several_participations(self):
        often = Participation(50, 4)
        once = optimise_blt(PrefixSums(), 200, 3)
        own = optimise_blt(PrefixSums(), 200, 3, often)

        def error(s):
            return s.sensitivity(often) ** 2 * PrefixSums().error(s.inverse())

        assert error(own) < error(once)
        c = own.materialize()
        assert own.sensitivity(often) == pytest.approx(
            np.linalg.norm(c[:, [0, 50, 100, 150]].sum(axis=1)), rel=1e-6
        )

    def test_refusals(self):
        with pytest.raises(ConfigurationError, match="bands for 5 steps"):
            optimise_banded(PrefixSums(), 5, 6)
        with pytest.raises(ConfigurationError, match="hours"):
            optimise_banded(PrefixSums(), 9000, 3)
        with pytest.raises(ConfigurationError, match="prefix sums"):
            optimise_blt(SPECTRUM, 20)
        with pytest.raises(ConfigurationError, match="decays"):
            BufferedToeplitz(np.ones(1), np.ones(1), 5)
        with pytest.raises(ConfigurationError, match="diagonal"):
            Banded(-np.ones((1, 3)))
        with pytest.raises(ConfigurationError, match="bands"):
            BandedToeplitz(np.ones(4), 3)


@pytest.mark.parametrize("rates", [(), (1.0, -0.1), (1.0, math.nan), (math.inf,)])
def test_a_schedule_without_usable_rates_is_refused(rates):
    with pytest.raises(ConfigurationError, match="learning rate of at least 0"):
        Schedule(rates)
