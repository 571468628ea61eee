"""``with_test=False``: the test part is neither opened nor read, in every format."""

import struct
import sys

import numpy as np
import pytest

from curvedp import data
from curvedp.data import npz
from curvedp.errors import ConfigurationError

OPENED = []


def _watch(event, arguments):
    if event == "open":
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _audit():
    sys.addaudithook(_watch)  # sees every way to open a file


def opened_test_parts():
    return [p for p in OPENED if any(m in p for m in ("t10k", "test_batch", "held"))]


@pytest.fixture(autouse=True)
def _forget():
    OPENED.clear()


def idx_folder(folder):
    for name in ("train", "t10k"):
        pixels = struct.pack(">4B3I", 0, 0, 8, 3, 4, 2, 2) + bytes(16)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(pixels)
        labels = struct.pack(">4BI", 0, 0, 8, 1, 4) + bytes(4)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return folder, {}


def cifar_folder(folder):
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (folder / name).write_bytes(bytes(2 * 3073))
    return folder, {}


def image_folder(folder):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        (folder / part / "cat").mkdir(parents=True)
        name = "a.png" if part == "train" else "held.png"
        image.new("RGB", (2, 2)).save(folder / part / "cat" / name)
    return folder, {"classes": ["cat"], "image_size": 2}


def table_files(folder):
    for name in ("a.csv", "held.csv"):
        (folder / name).write_text("x,y\n1,0\n2,1\n")
    options = {
        "target": "y",
        "columns": {"x": {"low": 0, "high": 3}},
        "classes": ["0", "1"],
    }
    return folder / "a.csv", {**options, "test": str(folder / "held.csv")}


def npz_files(folder):
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, int)
    np.savez(folder / "a.npz", x=x, y=y)
    np.savez(folder / "held.npz", x=x, y=y)
    return folder / "a.npz", {"num_classes": 2, "test": str(folder / "held.npz")}


@pytest.mark.parametrize(
    "make", [idx_folder, cifar_folder, image_folder, table_files, npz_files]
)
def test_files_stay_closed(make, tmp_path):
    spec, options = make(tmp_path)
    OPENED.clear()
    assert data.load(spec, with_test=False, **options).test is None
    assert opened_test_parts() == []
    assert data.load(spec, **options).test is not None
    assert opened_test_parts()  # the watch sees it when it is opened


def test_arrays_beside_the_training_part_are_not_read(tmp_path, monkeypatch):
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, int)
    path = tmp_path / "a.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    read, original = [], npz._read_member

    def watched(path, archive, member):
        read.append(member.filename)
        return original(path, archive, member)

    monkeypatch.setattr(npz, "_read_member", watched)
    assert data.load(path, num_classes=2, with_test=False).test is None
    assert sorted(read) == ["x_train.npy", "y_train.npy"]
    read.clear()
    assert data.load("digits", with_test=False).test is None
    assert sorted(read) == ["x_train.npy", "y_train.npy"]


def test_it_is_no_option_of_the_data(tmp_path):
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, int)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(ConfigurationError) as refused:
        data.load(tmp_path / "a.npz", nonsense=1)
    assert "num_classes" in refused.value.advice
    assert "with_test" not in refused.value.advice
