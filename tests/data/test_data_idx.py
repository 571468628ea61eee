import gzip
import struct

import numpy as np
import pytest
import torch

from curvedp.data import Task, load
from curvedp.errors import DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 9, 3, 3, 1], dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_folder(folder, *, packed=False, joint="-", images=IMAGES, labels=LABELS):
    for part in ("train", "t10k"):
        for name, array in (("images", images), ("labels", labels)):
            content = idx_bytes(array)
            path = folder / f"{part}-{name}{joint}idx{array.ndim}-ubyte"
            if packed:
                path = path.with_name(path.name + ".gz")
                content = gzip.compress(content)
            path.write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("joint", ["-", "."])
def test_round_trip(tmp_path, packed, joint):
    source = load(write_folder(tmp_path, packed=packed, joint=joint))
    assert source.task is Task.CLASSIFICATION
    assert source.num_classes == 10
    assert source.input_shape == (1, 28, 28)
    assert source.test is not None
    for part in (source.train, source.test):
        assert part.inputs.dtype == torch.float32
        expected = torch.from_numpy(IMAGES).float().unsqueeze(1) / 255
        assert torch.equal(part.inputs, expected)
        assert part.targets.tolist() == LABELS.tolist()


def test_pixels_are_scaled_by_the_format_and_not_by_the_data(tmp_path):
    dark = np.full((2, 28, 28), 51, dtype=np.uint8)
    source = load(write_folder(tmp_path, images=dark, labels=LABELS[:2]))
    assert torch.all(source.train.inputs == 0.2)


def test_the_test_part_may_be_absent(tmp_path):
    write_folder(tmp_path)
    for path in tmp_path.glob("t10k*"):
        path.unlink()
    assert load(tmp_path).test is None


def test_labels_beyond_the_declared_classes_are_refused(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(DataError, match=r"lies outside 0\.\.8"):
        load(tmp_path, num_classes=9)


def test_a_missing_labels_file_is_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="train part has no labels file"):
        load(tmp_path)


def test_the_format_can_be_forced_and_then_needs_its_files(tmp_path):
    with pytest.raises(DataError, match="no file train-images"):
        load(tmp_path, format="idx")


def test_lengths_must_agree(tmp_path):
    write_folder(tmp_path, labels=LABELS[:4])
    with pytest.raises(DataError, match="different numbers of examples"):
        load(tmp_path)


def damaged(content: bytes, kind: str) -> bytes:
    return {
        "magic": b"\x00\x00\x0d\x03" + content[4:],
        "dimensions": b"\x00\x00\x08\x01" + content[4:],
        "truncated": content[:-1],
        "header": content[:9],
        "empty": b"",
        "longer": content + b"\x00",
    }[kind]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("magic", "bad magic number, expected 00000803"),
        ("dimensions", "bad magic number, expected 00000803"),
        ("truncated", "truncated|more than the file"),
        ("header", "truncated"),
        ("empty", "truncated"),
        ("longer", "longer than its header says"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path, kind, message, packed):
    write_folder(tmp_path, packed=packed)
    (path,) = tmp_path.glob("train-images*")
    content = damaged(idx_bytes(IMAGES), kind)
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_claim_beyond_the_file_allocates_nothing(tmp_path, packed):
    write_folder(tmp_path, packed=packed)
    (path,) = tmp_path.glob("train-images*")
    content = struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match="more than the file"):
        load(tmp_path)


@pytest.mark.parametrize("cut", [1, 12, 40])
def test_a_damaged_gzip_is_a_data_error(tmp_path, cut):
    write_folder(tmp_path, packed=True)
    (path,) = tmp_path.glob("train-images*")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match="compressed data"):
        load(tmp_path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match="compressed data"):
        load(tmp_path)
