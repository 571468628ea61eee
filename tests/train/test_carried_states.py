"""States that are carried, rewound or met after a crash: nothing is had for nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.errors import CheckpointError, LedgerError
from curvedp.train import make_private

from .test_correlated_runs import (
    STEPS,
    advance,
    assert_independent,
    attach,
    noise_in,
    strategy_of,
)


def learning(run_dir, recipe="dp-sgd", **settings):
    """A run whose parameters move with every release."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator)
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return make_private(
        model, torch.optim.SGD(model.parameters(), 1.0),
        TensorDataset(inputs, inputs.argmax(1) % 3), recipe=recipe, run_dir=run_dir,
        loss="cross-entropy", noise_multiplier=1.0, delta=1e-4, sample_rate=0.1,
        steps=20, expected_batch_size=6.0, seed=3, **settings,
    )  # fmt: skip


class Killed(BaseException):
    """The process ends here."""


def killed(*_):
    raise Killed


# -- whose payments a state stands on --------------------------------------------------

REFUSED = "payments are not in this run's"


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-bandmf"])
@pytest.mark.parametrize(
    ("from_folder", "to_folder"),
    [(False, True), (True, False), (True, True)],
    ids=["memory to folder", "folder to memory", "folder to folder"],
)
def test_a_state_is_not_loaded_without_its_payments(
    tmp_path, recipe, from_folder, to_folder
):
    with attach(tmp_path / "a" if from_folder else None, recipe=recipe) as first:
        advance(first, 3)
        state = first.state_dict()
    with attach(tmp_path / "b" if to_folder else None, recipe=recipe) as second:
        with pytest.raises(CheckpointError, match=REFUSED):
            second.load_state_dict(state)
        assert second.step == 0 and second.epsilon() == 0


def test_the_payments_go_along_between_runs_in_memory():
    first, second = attach(recipe="dp-sgd"), attach(recipe="dp-sgd")
    advance(first, 3)
    second.load_state_dict(first.state_dict())
    assert second.epsilon() == first.epsilon() > 0
    advance(second, 1)
    second.load_state_dict(second.state_dict())  # of its own: a rewind
    assert second.step == 4 and second.steps_left() == STEPS - 4


def test_a_state_of_the_own_folder_is_loaded(tmp_path):
    with attach(tmp_path / "run", recipe="dp-sgd") as private:
        advance(private, 2)
        state = private.state_dict()
        advance(private, 3)
        private.load_state_dict(state)
        assert private.step == 2
        assert private.steps_left() == STEPS - 5  # the three steps stay paid


def test_a_state_that_has_paid_more_than_its_ledger_is_refused(tmp_path):
    """The folder was put back to an earlier copy, with the same run's name."""
    with attach(tmp_path / "run", recipe="dp-sgd") as private:
        advance(private, 3)
        state = private.state_dict()
        state["run"]["payments"] += 1
        with pytest.raises(CheckpointError, match=REFUSED):
            private.load_state_dict(state)


def test_a_state_without_the_name_of_its_run_is_refused_in_a_folder(tmp_path):
    with attach(tmp_path / "run", recipe="dp-sgd") as private:
        state = private.state_dict()
        del state["run"]
        with pytest.raises(CheckpointError, match=REFUSED):
            private.load_state_dict(state)


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-bandmf"])
def test_a_run_that_has_paid_does_not_take_in_another(recipe):
    """Both have paid for the same steps, and one payment would stand for two draws."""
    first, second = attach(recipe=recipe), attach(recipe=recipe)
    advance(first, 2)
    advance(second, 2)
    with pytest.raises(LedgerError, match="did not begin with"):
        second.load_state_dict(first.state_dict())
    assert second._engine.ledger.count() == 2


def test_runs_that_have_gone_on_apart_are_not_put_together():
    first, second = attach(recipe="dp-sgd"), attach(recipe="dp-sgd")
    advance(first, 2)
    begun = copy.deepcopy(first.state_dict())
    second.load_state_dict(begun)
    advance(first, 2)
    advance(second, 2)
    with pytest.raises(LedgerError, match="did not begin with"):
        second.load_state_dict(first.state_dict())
    second.load_state_dict(begun)  # a rewind to where it began gives nothing back
    assert second.step == 2 and second._engine.ledger.count() == 4


# -- releases that a rewind has made stale ---------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "settings"), [("dp-sgd", {}), ("dp-kfc", {"refresh": 3})]
)
def test_a_crash_does_not_bring_back_what_was_rewound(tmp_path, recipe, settings):
    with learning(tmp_path / "run", recipe, **settings) as private:
        advance(private, 2)
        private.save()
        state = copy.deepcopy(private.state_dict())
        advance(private, 5)
        private.load_state_dict(state)
        advance(private, 2)
        weight = private.model.module.weight.detach().clone()
    with learning(tmp_path / "run", recipe, **settings) as private:
        private.resume()
        assert private.step == 4
        assert torch.equal(private.model.module.weight, weight)
        assert private.steps_left() == 20 - 9  # five of them for nothing


# -- correlated noise ------------------------------------------------------------------


def test_the_secret_is_not_written_again_when_the_last_step_is_made(tmp_path):
    """The process died after its last release, before the secret was forgotten."""
    secret = tmp_path / "run" / "secret.json"
    with attach(tmp_path / "run") as private:
        advance(private, STEPS - 1)
        private._engine.noise.finish = killed
        with pytest.raises(Killed):
            advance(private, 1)
    assert secret.exists()
    with attach(tmp_path / "run") as private:
        private.resume()
        assert private.step == STEPS and private.steps_left() == 0
        assert not secret.exists()
    assert not secret.exists()


@pytest.mark.parametrize("memory", ["buffer", "regenerate"])
def test_the_noise_of_steps_that_are_made_again_is_undone_rightly(tmp_path, memory):
    """The earlier sitting has paid for them too, with entropy of its own."""
    folder, again = tmp_path / "run", slice(7, 17)
    with attach(folder, noise_memory=memory) as private:
        advance(private, 6)
        private.save()
        advance(private, 4)
    for step in range(7, 10):
        (folder / "journal" / f"step-{step:08d}.safetensors").unlink()
    with attach(folder, noise_memory=memory) as private:
        private.resume()
        assert private.step == again.start
        advance(private, 10)
        strategy = strategy_of(private).materialize()
    assert_independent(strategy[again, again] @ noise_in(folder, range(7, 17)))
