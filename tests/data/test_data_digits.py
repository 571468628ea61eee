import hashlib
from importlib import resources

import numpy as np
import pytest
import torch

from curvedp.data import Task, load
from curvedp.data.npz import read_npz

SHA256 = "73e1286042403e446ec046b5c8ab4fed71080835abadfcd04c275dc766c47928"
FOLDER = resources.files("curvedp.data")


def test_the_file_is_the_one_that_was_made():
    content = (FOLDER / "digits.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    assert len(content) < 100_000


def test_source_and_licence_are_beside_it():
    text = (FOLDER / "digits-LICENCE.txt").read_text(encoding="utf-8")
    for word in ("10.24432/C50P49", "CC BY 4.0", "Alpaydin", "1437", "360"):
        assert word in text
    assert "CC BY 4.0" in load("digits").facts["licence"]


def test_shapes_range_and_split():
    source = load("digits")
    assert source.task is Task.CLASSIFICATION
    assert (source.num_classes, source.input_shape) == (10, (1, 8, 8))
    assert source.test is not None
    assert (len(source.train), len(source.test)) == (1437, 360)
    for part in (source.train, source.test):
        assert part.inputs.dtype == torch.float32
        assert part.inputs.min() == 0
        assert part.inputs.max() == 1
        assert torch.equal(part.inputs * 16, (part.inputs * 16).round())
        assert part.targets.unique().tolist() == list(range(10))


def test_it_equals_the_copy_it_came_from():
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    with resources.as_file(FOLDER / "digits.npz") as path:
        arrays = read_npz(path)
    stored = np.concatenate([arrays["x_train"], arrays["x_test"]])
    assert np.array_equal(stored.reshape(len(images), -1), images[order])
    stored_labels = np.concatenate([arrays["y_train"], arrays["y_test"]])
    assert np.array_equal(stored_labels, labels[order])
