import pickle

import numpy as np
import pytest
import torch

from curvedp.data import load
from curvedp.errors import ConfigurationError, DataError

RNG = np.random.default_rng(1)


def records(labels: list[list[int]]) -> tuple[bytes, np.ndarray]:
    pixels = RNG.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    rows = np.concatenate([np.array(labels, dtype=np.uint8), pixels], axis=1)
    return rows.tobytes(), pixels


def test_cifar10_batches_come_in_order(tmp_path):
    first, first_pixels = records([[3], [9]])
    second, _ = records([[0]])
    held_out, _ = records([[7]])
    (tmp_path / "data_batch_2.bin").write_bytes(second)
    (tmp_path / "data_batch_1.bin").write_bytes(first)
    (tmp_path / "test_batch.bin").write_bytes(held_out)
    source = load(tmp_path)
    assert source.name == "cifar10"
    assert source.num_classes == 10
    assert source.train.targets.tolist() == [3, 9, 0]
    assert source.test is not None
    assert source.test.targets.tolist() == [7]
    expected = torch.from_numpy(first_pixels[0]).view(3, 32, 32).float() / 255
    assert torch.equal(source.train.inputs[0], expected)


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    content, pixels = records([[19, 99], [4, 30]])
    (tmp_path / "train.bin").write_bytes(content)
    fine = load(tmp_path)
    assert (fine.name, fine.num_classes, fine.test) == ("cifar100", 100, None)
    assert fine.train.targets.tolist() == [99, 30]
    coarse = load(tmp_path, labels="coarse")
    assert coarse.num_classes == 20
    assert coarse.train.targets.tolist() == [19, 4]
    expected = torch.from_numpy(pixels).view(-1, 3, 32, 32).float() / 255
    assert torch.equal(coarse.train.inputs, expected)
    with pytest.raises(ConfigurationError, match="'fine' or 'coarse'"):
        load(tmp_path, labels="middle")


@pytest.mark.parametrize("change", [-1, 1, None], ids=["short", "long", "empty"])
def test_files_hold_whole_records(tmp_path, change):
    content, _ = records([[3], [9]])
    path = tmp_path / "data_batch_1.bin"
    sizes = {-1: content[:-1], 1: content + b"\x00", None: b""}
    path.write_bytes(sizes[change])
    with pytest.raises(DataError, match="whole number of records") as caught:
        load(tmp_path)
    assert path.name in str(caught.value)


def test_labels_out_of_range_are_refused(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(records([[3], [10]])[0])
    with pytest.raises(DataError, match=r"example 1 lies outside 0\.\.9"):
        load(tmp_path)


class Trap:
    """Says so if a pickle is ever loaded."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "train", "meta"])
def test_pickled_batches_are_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="binary version"):
        load(tmp_path)
    assert not Trap.sprung
