"""Whitened runs with several bands: what one example does across a new whitener."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from curvedp.barrier import ClippedSum
from curvedp.noise import CorrelatedMechanism, RandomStreams
from curvedp.noise.strategies import optimise_banded
from curvedp.train.journal import Journal

from .test_noisecurve_runs import attach, train

STEPS, BANDS, REFRESH = 24, 3, 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one refresh: it, its releases' frames, and its whiteners' maps."""
    folder = tmp_path_factory.mktemp("noisecurve") / "run"
    with attach(
        "dp-kfc+noisecurve", run_dir=folder, steps=STEPS, bands=BANDS, lr=2.0,
        refresh=REFRESH, probe_size=16, probe_batches=1, unsafe_reproducible_noise=1,
        accountant="rdp",
    ) as private:  # fmt: skip
        source, maps = private._engine.whiteners, {}
        plain = source.at

        def watched(step):
            whitener = plain(step)
            model = private._engine.model
            named = {n: p.detach() for n, p in model.named_parameters()}
            maps[step] = whitener.materialize(named).double().numpy()
            return whitener

        source.at = watched
        train(private, STEPS)
        journal = Journal(folder / "journal")
        frames = [journal.read(step)[0].frame for step in range(STEPS)]
    return private, frames, maps


def released(mechanism, frames):
    """K with ``K x = z``: the mechanism run once for every z, on one coordinate."""

    class OneAtATime(RandomStreams):
        def __init__(self, place):
            super().__init__(0)
            self.place = place

        def standard_normals(self, values, *at, again=False):
            return [torch.full((1,), float(at[0] == self.place), dtype=torch.float64)]

    columns = []
    for place in range(STEPS):
        state, row = mechanism.init(OneAtATime(place)), []
        for step, frame in enumerate(frames):
            zero = {"w": torch.zeros(1, dtype=torch.float64)}
            release, state = mechanism.update(
                ClippedSum(zero, mechanism.bound, frame, step), state
            )
            row.append(float(release.values["w"]))
        columns.append(row)
    scale = mechanism.noise_multiplier * mechanism.bound
    return np.linalg.inv(np.stack(columns, axis=1) / scale)


def turns():
    """The steps of each group."""
    return [np.arange(first, STEPS, BANDS) for first in range(BANDS)]


def most(matrix, steps):
    """Exact Mahalanobis sensitivity: contributions are vectors of any direction."""
    gram = matrix[:, steps].T @ matrix[:, steps]
    return np.sqrt(np.abs(gram).sum())


def test_the_second_whitener_is_another_frame(run):
    _, frames, maps = run
    assert len(set(frames[:REFRESH])) == len(set(frames[REFRESH:])) == 1
    assert frames[REFRESH - 1] != frames[REFRESH]
    assert not np.allclose(maps[0], maps[REFRESH], rtol=0.01)


def test_an_example_does_what_is_paid_for_and_no_more(run):
    private, frames, _ = run
    matrix = released(private.plan.mechanism(), frames)
    assert np.abs(matrix - np.diag(np.diag(matrix))).max() > 0.1  # it is correlated
    assert np.abs(matrix[REFRESH:, :REFRESH]).max() < 1e-12
    assert private.plan.rounds == STEPS / BANDS
    for steps in turns():
        assert most(matrix, steps) <= np.sqrt(private.plan.rounds) * (1 + 1e-9)


def test_nor_with_a_strategy_that_knows_of_no_refresh(run):
    private, frames, maps = run
    design = private.plan.correlation.design
    strategy = optimise_banded(design.named_workload(), STEPS, BANDS)
    whole = strategy.materialize()
    assert np.abs(whole[REFRESH:, :REFRESH]).max() > 0.1
    own = private.plan.mechanism()
    mechanism = CorrelatedMechanism(own.noise_multiplier, own.bound, strategy, "buffer")
    matrix = released(mechanism, frames)
    assert np.abs(matrix[REFRESH:, :REFRESH]).max() < 1e-12
    allowed = np.sqrt(private.plan.rounds)
    assert max(most(matrix, steps) for steps in turns()) <= allowed * (1 + 1e-9)
    # carried through the new map, noise would hide less of an example's last step:
    # columns of one group share no row, so the worst direction of each is the worst
    carried = np.linalg.norm(maps[REFRESH] @ np.linalg.inv(maps[0]), 2)
    assert carried > 2
    stretched = whole.copy()
    stretched[REFRESH:, :REFRESH] *= carried
    assert max(most(stretched, steps) for steps in turns()) > 1.1 * allowed


def test_a_frozen_whitener_keeps_one_block(run):
    private, _, _ = run
    one = replace(private.plan.correlation.design, block=0).strategy().materialize()
    assert np.abs(one[REFRESH:, :REFRESH]).max() > 0.1
