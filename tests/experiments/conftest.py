"""A tiny data set and a tiny run, so that the tests are about behaviour."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from curvedp.experiments import RunConfig


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    """Three clouds in six dimensions: 90 to train, 30 to test."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 6)) * 2
    y = np.arange(120) % 3
    x = (centres[y] + rng.normal(size=(120, 6)) * 0.3).astype(np.float32)
    path = tmp_path / "blobs.npz"
    np.savez(path, x_train=x[:90], y_train=y[:90], x_test=x[90:], y_test=y[90:])
    return path


@pytest.fixture
def config(blobs: Path) -> RunConfig:
    """Twelve steps of dp-sgd; no calibration, no secret noise."""
    return RunConfig(
        data=str(blobs),
        data_options={"num_classes": 3},
        model="logreg",
        recipe_settings={"learning_rate": 0.5},
        privacy={"noise_multiplier": 2.0, "batch_size": 30, "epochs": 4, "delta": 1e-3},
        seed=1,
        unsafe_reproducible_noise=5,
        device="cpu",
        checkpoint_every=5,
    )


@pytest.fixture
def base(config: RunConfig) -> RunConfig:
    """For sweeps: judged by a share that is declared public, so scores are exact."""
    return replace(config, validation=0.3, validation_is_public=True)


@pytest.fixture
def private(base: RunConfig) -> RunConfig:
    """The same with secret noise."""
    return replace(base, unsafe_reproducible_noise=None)
