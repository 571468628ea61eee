"""CIFAR-10 and CIFAR-100 in their binary form.

The better-known "python version" is a set of pickles, and reading a pickle runs
whatever code it holds. The binary version has the same images and only bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from curvedp.data.files import reading
from curvedp.data.source import ArrayDataset, DataSource, Task
from curvedp.errors import ConfigurationError, DataError

__all__ = ["is_cifar_folder", "load_cifar_folder", "refuse_pickles"]

_IMAGE_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
_PIXEL_LEVELS = 255.0
_PICKLED_BATCHES = ("data_batch_1", "test_batch", "batches.meta", "meta", "train")


def is_cifar_folder(folder: Path) -> bool:
    """Whether the folder holds binary CIFAR batches."""
    return bool(_cifar10_batches(folder)) or (folder / "train.bin").is_file()


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder that holds CIFAR's pickled batches.

    Raises:
        DataError: With the name of the version to get instead.
    """
    for name in _PICKLED_BATCHES:
        path = folder / name
        if path.is_file():
            raise DataError(
                f"{path}: looks like a pickled CIFAR batch, and reading a pickle runs "
                "the code in it",
                'get the "binary version" of the data set (data_batch_1.bin, ...)',
            )


def load_cifar_folder(
    folder: Path, *, labels: str = "fine", with_test: bool = True
) -> DataSource:
    """Load binary CIFAR-10 (``data_batch_*.bin``) or CIFAR-100 (``train.bin``).

    Pixels are divided by 255, the range that the format declares.

    Args:
        folder: Where the files lie.
        labels: For CIFAR-100, ``"fine"`` (100 classes) or ``"coarse"`` (20).
        with_test: False leaves the test batch closed.

    Raises:
        DataError: If a file is not a whole number of records, or a label is wrong.
    """
    batches = _cifar10_batches(folder)
    if batches:
        name, label_bytes, label_at, num_classes = "cifar10", 1, 0, 10
        test_path = folder / "test_batch.bin"
    else:
        if labels not in ("fine", "coarse"):
            raise ConfigurationError(
                f"unknown CIFAR-100 labels {labels!r}", "choose 'fine' or 'coarse'"
            )
        fine = labels == "fine"
        name, label_bytes = "cifar100", 2
        label_at, num_classes = (1, 100) if fine else (0, 20)
        batches, test_path = [folder / "train.bin"], folder / "test.bin"

    def part(paths: list[Path]) -> ArrayDataset:
        records = np.concatenate([_read_records(path, label_bytes) for path in paths])
        pixels = torch.from_numpy(records[:, label_bytes:].copy())
        targets = torch.from_numpy(records[:, label_at].copy()).long()
        return ArrayDataset(
            pixels.view(-1, *_IMAGE_SHAPE).float().div_(_PIXEL_LEVELS), targets
        )

    return DataSource(
        name=name,
        train=part(batches),
        test=part([test_path]) if with_test and test_path.is_file() else None,
        task=Task.CLASSIFICATION,
        num_outputs=num_classes,
        input_shape=_IMAGE_SHAPE,
        facts={"format": "CIFAR binary", "scaling": "pixels / 255"},
    )


def _cifar10_batches(folder: Path) -> list[Path]:
    return sorted(folder.glob("data_batch_*.bin"))


def _read_records(path: Path, label_bytes: int) -> np.ndarray:
    record_bytes = label_bytes + _IMAGE_BYTES
    with reading(path):
        content = path.read_bytes()
    if not content or len(content) % record_bytes:
        raise DataError(
            f"{path}: its size is not a whole number of records of {record_bytes} "
            "bytes",
            "the file is truncated or of the other CIFAR; get it again",
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, record_bytes)
