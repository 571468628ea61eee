"""Declared public normalisation of inputs."""

import numpy as np
import pytest
import torch

from curvedp.data import load
from curvedp.errors import ConfigurationError


@pytest.fixture
def stored(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.random((20, 3, 4, 5), dtype=np.float32)
    path = tmp_path / "data.npz"
    np.savez(path, x=x, y=generator.integers(0, 2, 20))
    return path


def test_inputs_are_shifted_and_scaled_by_the_constants(stored):
    plain = load(stored, num_classes=2)
    one = load(stored, num_classes=2, mean=0.5, std=0.25)
    assert torch.allclose(one.train.inputs, (plain.train.inputs - 0.5) / 0.25)
    each = load(stored, num_classes=2, mean=[0.1, 0.2, 0.3], std=[1, 2, 4])
    shift = torch.tensor([0.1, 0.2, 0.3]).reshape(3, 1, 1)
    scale = torch.tensor([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    assert torch.allclose(each.train.inputs, (plain.train.inputs - shift) / scale)
    assert torch.equal(each.train.targets, plain.train.targets)
    only = load(stored, num_classes=2, std=0.5)
    assert torch.allclose(only.train.inputs, 2 * plain.train.inputs)
    assert "0.5" in one.facts["scaling"]


def test_the_test_part_gets_the_same_constants():
    plain, scaled = load("digits"), load("digits", mean=0.3, std=0.4)
    assert torch.allclose(scaled.test.inputs, (plain.test.inputs - 0.3) / 0.4)


@pytest.mark.parametrize(
    "bad",
    [
        {"mean": "big"}, {"mean": [1.0, 2.0]}, {"mean": float("nan")}, {"mean": True},
        {"std": 0.0}, {"std": [-1, 1, 1]}, {"std": float("inf")},
    ],
    ids=str,
)  # fmt: skip
def test_constants_that_make_no_sense_are_refused(stored, bad):
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        load(stored, num_classes=2, **bad)
