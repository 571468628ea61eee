"""Runs with correlated noise: what is paid, what is kept secret, how they go on."""

import json
import math
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from curvedp.accounting import CyclicGaussianEvent, PLDAccountant, sequential
from curvedp.errors import CheckpointError, ConfigurationError
from curvedp.plan import Correlation, Plan, SamplingPlan
from curvedp.recipes import get_recipe
from curvedp.train import Trainer, make_private
from curvedp.train.journal import Journal
from curvedp.train.secret import drawing_device

WIDTH = 40  # 1600 weights
BANDS, STEPS, SIZE = 4, 24, 120
RUN = {
    "recipe": "dp-bandmf", "bands": BANDS, "loss": "mse", "noise_multiplier": 1.0,
    "delta": 1e-4, "sample_rate": 0.1, "steps": STEPS, "expected_batch_size": 12.0,
}  # fmt: skip


def silent_net():
    """Zero weights that learn nothing from zero targets: releases are pure noise."""
    net = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.zeros_(net.weight)
    return net


def silent_data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SIZE, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.zeros(SIZE, WIDTH))


def attach(run_dir=None, data=None, **settings):
    net = silent_net()
    sgd = torch.optim.SGD(net.parameters(), 0.0)
    given = {**RUN, **settings}
    if given["recipe"] == "dp-sgd":
        del given["bands"]
    return make_private(net, sgd, data or silent_data(), run_dir=run_dir, **given)


def advance(private, steps):
    stop = private.step + steps
    while private.step < stop and private.steps_left():
        for batch in private.loader:
            private.train_on(batch)
            if private.step == stop:
                return


def noise_in(run_dir, steps):
    journal = Journal(run_dir / "journal")
    rows = [journal.read(step)[0].values["weight"].flatten() for step in steps]
    return torch.stack(rows).double().numpy()


def strategy_of(private):
    return private.plan.correlation.design.strategy()


def assert_independent(z):
    """Rows of unit normals, uncorrelated with each other."""
    error = 5 / math.sqrt(z.shape[1])
    assert np.abs(np.corrcoef(z) - np.eye(len(z))).max() < error
    assert np.abs(z.std(axis=1) - 1).max() < error


class TestARun:
    def test_its_releases_have_the_noise_of_the_strategy(self, tmp_path):
        with attach(tmp_path / "run") as private:
            advance(private, STEPS)
        found = noise_in(tmp_path / "run", range(STEPS))
        own = strategy_of(private)
        assert_independent(own.materialize() @ found)
        variances = np.linalg.norm(own.inverse(), axis=1)
        assert found.std(axis=1) == pytest.approx(variances, rel=0.12)
        release = Journal(tmp_path / "run" / "journal").read(5)[0]
        assert release.noise_std == pytest.approx(variances[5])

    def test_every_step_pays_for_its_group(self):
        private = attach()
        advance(private, STEPS)
        events = [p.event for p in private._engine.ledger.payments()]
        assert [e.group for e in events] == [t % BANDS for t in range(STEPS)]
        assert all(isinstance(e, CyclicGaussianEvent) for e in events)
        assert {e.groups for e in events} == {BANDS}
        assert {e.sample_rate for e in events} == {0.4}
        assert private.epsilon() == private.plan.epsilon()
        ((event, count),) = sequential(private._engine.ledger.event()).parts
        assert count == STEPS / BANDS and event.sample_rate == pytest.approx(0.4)

    @pytest.mark.parametrize("by_size", [False, True])
    def test_no_example_is_drawn_out_of_turn(self, by_size):
        class Watched(Dataset):
            def __init__(self):
                self.seen = []

            def __len__(self):
                return SIZE

            def __getitem__(self, i):
                self.seen.append(i)
                return torch.zeros(WIDTH), torch.zeros(WIDTH)

        data = Watched()
        declared = {}
        if by_size:
            declared = dict.fromkeys(["sample_rate", "steps", "expected_batch_size"])
            declared |= {"batch_size": 12, "epochs": 4}
        private = attach(data=data, **declared)
        data.seen.clear()  # one example was looked at for its shape
        turns, drawn = {}, 0
        while private.steps_left():
            for batch in private.loader:
                step = private.step
                for i in data.seen:
                    assert turns.setdefault(i, step % BANDS) == step % BANDS
                drawn += len(data.seen)
                data.seen.clear()
                private.train_on(batch)
                data.seen.clear()  # prefetched by nobody: one step at a time
        assert len(turns) > 0.8 * SIZE
        assert drawn > 0

    def test_budget_and_statement(self):
        private = attach(noise_multiplier=None, epsilon=3.0, bands="auto")
        assert private.plan.epsilon() <= 3.0
        assert private.plan.correlation.bands > 1
        text = str(private.statement())
        groups = private.plan.correlation.bands
        assert f"cyclic Poisson: {groups} secret groups" in text
        assert f"no example is in more than {private.plan.rounds} draws" in text
        assert "correlated over steps by a banded strategy" in text
        assert "secret.json" in text
        facts = private.statement().facts
        assert facts["sampling"] == "cyclic-poisson" and facts["groups"] == groups

    def test_one_band_is_dp_sgd(self):
        one = attach(bands=1, unsafe_reproducible_noise=1)
        plain = attach(recipe="dp-sgd", unsafe_reproducible_noise=1)
        assert one.plan.epsilon() == pytest.approx(plain.plan.epsilon())
        assert one.plan.event_rate == plain.plan.event_rate

    def test_regenerated_noise_makes_the_same_run(self, tmp_path):
        rows = []
        for keep in ("buffer", "regenerate"):
            folder = tmp_path / keep
            with attach(
                folder, noise_memory=keep, unsafe_reproducible_noise=4
            ) as private:
                advance(private, STEPS)
            rows.append(noise_in(folder, range(STEPS)))
        assert rows[0] == pytest.approx(rows[1], abs=1e-4)

    def test_a_new_whitener_begins_a_block(self, tmp_path):
        recipe = replace(
            get_recipe("dp-kfc"), correlation=Correlation(bands=2), name="dp-kfc+bandmf"
        )
        private = attach(
            tmp_path / "run", recipe=recipe, bands=2, refresh=10, probe_batches=1,
            probe_size=16,
        )  # fmt: skip
        advance(private, STEPS)
        assert private.state_dict()["noise"]["start"] == 20
        own = strategy_of(private)
        found = noise_in(tmp_path / "run", range(STEPS))
        for first, stop in ((0, 10), (10, 20), (20, STEPS)):
            block = own.materialize()[first:stop, first:stop]
            assert_independent(block @ found[first:stop])
        assert np.abs(own.materialize()[10:, :10]).max() < 1e-12
        private.close()

    def test_adam_takes_it_as_well(self):
        trainer = Trainer(
            silent_net(), "mse", "dp-bandmf+adam", bands=2, noise_multiplier=1.0,
            delta=1e-4, sample_rate=0.1, steps=6, expected_batch_size=12.0,
        )  # fmt: skip
        assert trainer.fit(silent_data()).steps == 6


def crash(private):
    """The process is gone: nothing is saved, the lock is released."""
    private.close()


def resumed(folder, **settings):
    private = attach(folder, **settings)
    private.resume()
    return private


def start(private):
    return private.state_dict()["noise"].get("start")


class TestGoingOn:
    @pytest.mark.parametrize("keep", ["buffer", "regenerate"])
    def test_a_resumed_run_goes_on_with_its_block(self, tmp_path, keep):
        folder = tmp_path / "run"
        private = attach(folder, noise_memory=keep)
        advance(private, 6)
        private.save()
        advance(private, 5)
        crash(private)
        private = resumed(folder, noise_memory=keep)
        assert private.step == 11 and start(private) == 0
        advance(private, 4)
        private.save()
        crash(private)
        private = resumed(folder, noise_memory=keep)
        assert start(private) == 0
        advance(private, STEPS)
        private.close()
        found = noise_in(folder, range(6, STEPS))
        # the journal has lost what is before the older checkpoint; K is banded, so
        # rows from three steps later on are whole
        rows = strategy_of(private).materialize()[9:, 6:]
        assert_independent(rows @ found)
        alone = strategy_of(private).materialize()[11:, 11:]
        apart = np.corrcoef(np.vstack([found[4:5], (alone @ found[5:])[:1]]))[0, 1]
        assert abs(apart) > 0.15  # a new block would not have known step 10

    def test_reproducible_noise_goes_on_to_the_bit(self, tmp_path):
        whole = attach(tmp_path / "whole", unsafe_reproducible_noise=9)
        advance(whole, STEPS)
        whole.close()
        private = attach(tmp_path / "run", unsafe_reproducible_noise=9)
        advance(private, 10)
        private.save()
        crash(private)
        private = resumed(tmp_path / "run", unsafe_reproducible_noise=9)
        advance(private, STEPS)
        private.close()
        last = range(10, STEPS)
        assert noise_in(tmp_path / "run", last) == pytest.approx(
            noise_in(tmp_path / "whole", last), abs=1e-6
        )

    def test_a_lost_release_begins_a_block_and_ends_the_run_earlier(self, tmp_path):
        folder = tmp_path / "run"
        private = attach(folder, noise_multiplier=None, epsilon=3.0)
        private.save()
        advance(private, 7)
        crash(private)
        Journal(folder / "journal").path(6).unlink()
        private = resumed(folder, noise_multiplier=None, epsilon=3.0)
        assert private.step == 6 and start(private) is None
        advance(private, 1)
        assert start(private) == 6
        advance(private, STEPS)
        # group 2 had its six turns one round earlier
        assert private.step == STEPS - 2
        assert private.epsilon() == private.plan.epsilon() <= 3.0
        found = noise_in(folder, range(private.step)) / private.plan.noise_multiplier
        own = strategy_of(private).materialize()
        assert_independent(own[:6, :6] @ found[:6])
        assert_independent(own[6:22, 6:22] @ found[6:])
        private.close()

    def test_noise_is_never_used_twice_even_from_a_copy_of_the_folder(self, tmp_path):
        import shutil

        folder, copy = tmp_path / "run", tmp_path / "copy"
        private = attach(folder)
        advance(private, 5)
        private.save()
        crash(private)
        shutil.copytree(folder, copy)
        rows = []
        for place in (folder, copy):
            private = resumed(place)
            advance(private, 3)
            rows.append(noise_in(place, range(5, 8)))
            private.close()
        own = strategy_of(private).materialize()[5:8, 5:8]
        one, other = (own @ r for r in rows)  # both less the same of the steps before
        for k in range(3):
            apart = one[k] - other[k]
            assert apart.std() > 1 / own[k, k] / 2

    def test_without_the_secret_groups_are_drawn_anew_and_the_budget_holds(
        self, tmp_path
    ):
        folder = tmp_path / "run"
        private = attach(folder, noise_multiplier=None, epsilon=3.0)
        advance(private, 9)
        private.save()
        crash(private)
        (folder / "secret.json").unlink()
        private = resumed(folder, noise_multiplier=None, epsilon=3.0)
        assert start(private) is None
        # nine steps were three rounds of a group; three rounds are left
        assert private.steps_left() == 12
        advance(private, STEPS)
        assert private.step == 21 and start(private) == 9
        assert private.epsilon() == private.plan.epsilon() <= 3.0
        names = {p.event.assignment for p in private._engine.ledger.payments()}
        assert len(names) == 2
        private.close()

    def test_on_another_kind_of_device_or_by_another_matrix_a_block_begins(
        self, tmp_path
    ):
        for name in ("device", "digest"):
            folder = tmp_path / name
            private = attach(folder)
            advance(private, 5)
            private.save()
            crash(private)
            path = next((folder / "checkpoints").glob("step-*"))
            private = attach(folder)
            setattr(private._engine.noise, f"_{name}", "other")
            private.resume()
            advance(private, 2)
            assert start(private) == 5
            # no checkpoint: the next sitting, as the first was, does not join either
            crash(private)
            private = resumed(folder)
            assert start(private) is None, path
            private.close()

    @pytest.mark.parametrize("saved", [True, False])
    def test_noise_of_another_kind_of_device_is_not_gone_on_with(self, tmp_path, saved):
        folder = tmp_path / "run"
        private = attach(folder)
        advance(private, 6)
        if saved:
            private.save()
        advance(private, 2)
        crash(private)
        path = folder / "secret.json"
        path.write_text(path.read_text().replace('"cpu"', '"cuda"'))
        private = resumed(folder)
        assert private.step == 8 and start(private) is None
        private.close()

    def test_gpus_of_two_models_are_two_kinds_of_device(self, monkeypatch):
        # the order of a large tensor's numbers depends on how many processors it has
        models = {0: "one", 1: "other", 2: "one"}
        monkeypatch.setattr(
            torch.cuda, "get_device_name", lambda device: models[device.index]
        )
        found = [drawing_device(torch.device("cuda", n)) for n in models]
        assert found == ["cuda one", "cuda other", "cuda one"]
        assert drawing_device(torch.device("cpu")) == "cpu"

    def test_a_state_loaded_into_another_process_begins_a_block(self):
        private = attach()
        advance(private, 5)
        state = private.state_dict()
        private.load_state_dict(state)
        assert start(private) == 0  # the same streams: nothing was lost
        other = attach()
        other.load_state_dict(state)
        assert start(other) is None
        advance(other, 1)
        assert start(other) == 5
        # five steps were two rounds of a group, and one of these is used now
        assert other.steps_left() == 4 * BANDS - 1

    def test_a_rewind_in_the_same_process(self):
        private = attach()
        advance(private, 4)
        state = private.state_dict()
        advance(private, 3)
        private.load_state_dict(state)
        assert private.step == 4 and start(private) is None
        advance(private, 2)
        assert start(private) == 4
        payments = private._engine.ledger.payments()
        assert [(p.step, p.attempt) for p in payments[7:]] == [(4, 1), (5, 1)]

    def test_the_end_removes_the_secret(self, tmp_path):
        private = attach(tmp_path / "run")
        advance(private, STEPS - 1)
        assert (tmp_path / "run" / "secret.json").exists()
        advance(private, 1)
        assert not (tmp_path / "run" / "secret.json").exists()
        private.save()
        private.close()
        private = resumed(tmp_path / "run")
        assert not (tmp_path / "run" / "secret.json").exists()
        private.close()


class TestSecrecy:
    def test_its_file_is_the_owner_s_alone_and_says_so(self, tmp_path):
        private = attach(tmp_path / "run")
        advance(private, 2)
        path = tmp_path / "run" / "secret.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        content = json.loads(path.read_text())
        assert "Do not copy or share" in content["warning"]
        private.save()
        private.close()
        entropy = content["sittings"][0]["entropy"]
        assert int(entropy, 16) > 2**200
        shared = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p != path]
        assert shared
        for file in shared:
            data = file.read_bytes()
            assert entropy.encode() not in data
            assert bytes.fromhex(entropy) not in data

    def test_a_checkpoint_has_no_noise(self, tmp_path):
        from curvedp.train.checkpoint import checkpoint_folders, load_checkpoint

        private = attach(tmp_path / "run")
        advance(private, 5)
        private.save()
        private.close()
        folder = checkpoint_folders(tmp_path / "run" / "checkpoints")[-1]
        stored = load_checkpoint(folder).state["noise"]
        assert stored.keys() == {"start", "frame", "device", "digest"}
        assert all(isinstance(v, int | str) for v in stored.values())

    def test_the_secret_of_another_run_is_not_used(self, tmp_path):
        old = attach(tmp_path / "old")
        advance(old, 2)
        old.close()
        (tmp_path / "new").mkdir()
        secret = tmp_path / "new" / "secret.json"
        (tmp_path / "old" / "secret.json").rename(secret)
        before = json.loads(secret.read_text())["sittings"][0]["entropy"]
        new = attach(tmp_path / "new")
        kept = json.loads(secret.read_text())["sittings"]
        assert len(kept) == 1 and kept[0]["entropy"] != before
        assert new._engine.streams.fingerprint() != old._engine.streams.fingerprint()
        new.close()

    def test_a_damaged_one_is_refused(self, tmp_path):
        private = attach(tmp_path / "run")
        advance(private, 2)
        private.close()
        (tmp_path / "run" / "secret.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"secret\.json cannot be used"):
            attach(tmp_path / "run")

    def test_the_fingerprint_is_not_the_entropy(self):
        streams = attach()._engine.streams
        assert int(streams.fingerprint(), 16) != streams.reveal_secret() % 2**64
        assert len(streams.fingerprint()) == 16


class TestTogether:
    def refused(self, match, **settings):
        with pytest.raises(ConfigurationError, match=match):
            attach(**settings)

    def test_what_does_not_go_with_it(self):
        self.refused("grid", secure=True)
        self.refused("adaptive clipping", clipping="adaptive")
        self.refused("noise_multiplier was given", bands="auto")
        self.refused("more than a group has", bands=11)
        self.refused("no bands", strategy="blt")
        self.refused("unknown strategy", strategy="tree")
        self.refused("bands is 0", bands=0)
        self.refused("noise_memory", noise_memory="disk")
        self.refused("momentum of a workload", noise_momentum=1.0)

    def test_recipes_that_learn_from_releases(self):
        with pytest.raises(ConfigurationError, match="learns curvature from releases"):
            replace(get_recipe("dp-soap"), correlation=Correlation())

    def test_averages_before_a_correction_for_noise(self):
        from curvedp.update import AdamBC, Momentum

        correlated = replace(get_recipe("dp-sgd"), correlation=Correlation())
        with pytest.raises(ConfigurationError, match="for independent"):
            correlated.then(Momentum(), AdamBC())
        correlated.then(AdamBC(), Momentum(mu=0.5))

    def test_a_whitener_that_changes_too_often(self):
        recipe = replace(get_recipe("dp-kfc"), correlation=Correlation())
        self.refused("ends the block", recipe=recipe, refresh=8)

    def test_a_resume_with_other_bands(self, tmp_path):
        private = attach(tmp_path / "run")
        advance(private, 2)
        private.close()
        with pytest.raises(ConfigurationError, match="belongs to a run with"):
            attach(tmp_path / "run", bands=2)


class TestAutomaticBands:
    def plan(self, epsilon, **sampling):
        declared = {"sample_rate": 0.01, "steps": 500, "expected_batch_size": 100.0}
        return Plan.make(
            SamplingPlan.by_rate(**{**declared, **sampling}),
            get_recipe("dp-sgd").clipping_rule(),
            delta=1e-5,
            epsilon=epsilon,
            correlation=Correlation(strategy="toeplitz", most_bands=8),
        )

    def test_a_larger_budget_has_more_bands(self):
        small, large = (self.plan(e, steps=100, sample_rate=0.2) for e in (0.3, 8.0))
        assert small.correlation.bands < large.correlation.bands

    @pytest.mark.slow
    def test_no_other_number_of_bands_predicts_less(self):
        from curvedp.accounting import calibrate_sigma
        from curvedp.noise.design import error_of
        from curvedp.noise.strategies import PrefixSums, optimise_toeplitz

        def error(bands):
            sigma = calibrate_sigma(
                4.0, 1e-5, sample_rate=0.01 * bands, steps=math.ceil(500 / bands),
                relation="add-remove", accountant=PLDAccountant(1e-3),
            )  # fmt: skip
            own = optimise_toeplitz(PrefixSums(), 500, bands)
            return sigma**2 * error_of(own, PrefixSums())

        chosen = self.plan(4.0).correlation.bands
        best = min(error(b) for b in range(1, 9))
        assert error(chosen) <= 1.02 * best

    def test_it_stays_within_what_batches_allow(self):
        assert self.plan(8.0, sample_rate=0.4).correlation.bands <= 2

    def test_rounding_of_a_rate_is_no_band_less(self):
        half = 1.1 - 0.6
        assert half > 0.5
        plan = self.plan(8.0, sample_rate=half)
        assert plan.correlation.bands <= 2 and plan.event_rate <= 1.0
        assert Correlation(bands=2).planned(10, 2).rate(plan.sampling) == 1.0
