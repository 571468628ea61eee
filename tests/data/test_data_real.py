"""Real files, when the environment variable CURVEDP_DATA names their folder."""

import os
from pathlib import Path

import pytest

from curvedp.data import load

FOLDER = os.environ.get("CURVEDP_DATA")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_as_published(name):
    if not FOLDER:
        pytest.skip("CURVEDP_DATA is not set")
    folder = Path(FOLDER) / name
    if not folder.is_dir():
        pytest.skip(f"CURVEDP_DATA has no folder {name}")
    source = load(folder)
    assert source.test is not None
    assert source.train.inputs.shape == (60_000, 1, 28, 28)
    assert source.test.inputs.shape == (10_000, 1, 28, 28)
    assert source.train.inputs.min() == 0
    assert source.train.inputs.max() == 1
    counts = source.test.targets.bincount().tolist()
    published = {"mnist": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]}
    assert counts == published.get(name, [1000] * 10)
