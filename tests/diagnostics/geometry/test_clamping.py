"""The loss along a run: looked at apart from the steps, ended where it diverges."""

import math

import pytest
import torch

from curvedp import Trainer
from curvedp.diagnostics.geometry import CLAMPS, loss_path
from curvedp.errors import ConfigurationError
from tests.diagnostics.geometry.nets import cnn, digits

SETTINGS = {
    "noise_multiplier": 1.0,
    "sample_rate": 0.2,
    "steps": 6,
    "expected_batch_size": 60,
    "seed": 0,
    "unsafe_reproducible_noise": 1,
}


def trainer_of(model, **settings):
    def make(look):
        return Trainer(
            model, "cross-entropy", on_progress=look, **{**SETTINGS, **settings}
        )

    return make


def ngd(model, **settings):
    return trainer_of(
        model, recipe="dp-ngd", probe_size=32, probe_batches=1, **settings
    )


def test_a_floor_keeps_the_noise_from_throwing_the_parameters_away():
    paths = {
        name: loss_path(ngd(cnn(), **CLAMPS[name]), digits(), examples=64)
        for name in ("fixed", "none")
    }
    assert paths["fixed"].steps == list(range(7))
    assert paths["fixed"].losses[-1] < paths["fixed"].losses[0]
    worst = max(paths["none"].losses)
    assert paths["none"].diverged_at is not None or worst > 2 * paths["none"].losses[0]


def test_looking_changes_nothing():
    seen, unseen = cnn(), cnn()
    loss_path(ngd(seen, **CLAMPS["scheduled"]), digits(), every=2)
    ngd(unseen, **CLAMPS["scheduled"])(lambda _: None).fit(digits())
    for a, b in zip(seen.parameters(), unseen.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(module.training for module in seen.modules())


def test_a_run_that_becomes_no_number_ends_there():
    path = loss_path(
        trainer_of(cnn(), recipe="dp-sgd", learning_rate=1e38), digits(), examples=16
    )
    assert path.diverged_at in (1, 2)
    assert all(math.isfinite(loss) for loss in path.losses)
    assert path.to_json()["private"] is False


def test_other_errors_stay_errors():
    with pytest.raises(ConfigurationError, match="no noise"):
        loss_path(trainer_of(cnn(), recipe="non-private"), digits())
    with pytest.raises(ConfigurationError, match="unknown setting"):
        loss_path(trainer_of(cnn(), color="red"), digits())
