"""Folders in the IDX format of MNIST and FashionMNIST."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvedp.data.files import (
    open_bytes,
    read_exactly,
    reading,
    refuse_impossible_size,
)
from curvedp.data.source import ArrayDataset, DataSource, Task
from curvedp.errors import DataError

__all__ = ["is_idx_folder", "load_idx_folder", "read_idx"]

_UNSIGNED_BYTE = 0x08
_PIXEL_LEVELS = 255.0


def is_idx_folder(folder: Path) -> bool:
    """Whether the folder holds a file with MNIST's name for training images."""
    return _find(folder, "train", "images", 3) is not None


def load_idx_folder(
    folder: Path, *, num_classes: int = 10, with_test: bool = True
) -> DataSource:
    """Load MNIST-like IDX files: ``train-images-idx3-ubyte[.gz]`` and the like.

    Pixels are divided by 255, the range that the format declares. The ``t10k`` files
    are the test part, and may be absent.

    Args:
        folder: Where the files lie.
        num_classes: 10 for MNIST and its drop-in replacements.
        with_test: False leaves the ``t10k`` files closed.

    Raises:
        DataError: If a file is missing, broken or contradicts another one.
    """
    train = _load_part(folder, "train")
    if train is None:
        raise DataError(
            f"{folder}: no file train-images-idx3-ubyte",
            "the folder should hold MNIST's four files, packed by gzip or not",
        )
    return DataSource(
        name=folder.name,
        train=train,
        test=_load_part(folder, "t10k") if with_test else None,
        task=Task.CLASSIFICATION,
        num_outputs=num_classes,
        input_shape=tuple(train.inputs.shape[1:]),
        facts={"format": "IDX", "scaling": "pixels / 255"},
    )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes with a given number of dimensions.

    Raises:
        DataError: If the magic number, the sizes or the length are wrong.
    """
    with reading(path), open_bytes(path) as stream:
        magic = read_exactly(stream, 4, path)
        expected = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
        if magic != expected:
            raise DataError(
                f"{path}: bad magic number, expected {expected.hex()}",
                "this is not an IDX file of unsigned bytes; is the name right?",
            )
        header = read_exactly(stream, 4 * dimensions, path)
        shape = struct.unpack(f">{dimensions}I", header)
        size = math.prod(shape)
        if 0 in shape[1:]:
            raise DataError(
                f"{path}: an example is empty, a side of it is 0",
                "every side of an input is 1 or more",
            )
        refuse_impossible_size(path, size)
        content = read_exactly(stream, size, path)
        if stream.read(1):
            raise DataError(
                f"{path}: longer than its header says", "get the file again"
            )
    # A bytearray may be written to, as torch wants it: no second copy of large data.
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _load_part(folder: Path, part: str) -> ArrayDataset | None:
    images_path = _find(folder, part, "images", 3)
    labels_path = _find(folder, part, "labels", 1)
    if images_path is None and labels_path is None:
        return None
    if images_path is None or labels_path is None:
        missing = "images" if images_path is None else "labels"
        raise DataError(
            f"{folder}: the {part} part has no {missing} file",
            f"add {part}-{missing}-idx{3 if missing == 'images' else 1}-ubyte",
        )
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} and {labels_path.name} hold different numbers of examples",
            "both files must come from the same data set and the same part",
        )
    return ArrayDataset(_scaled(images), torch.from_numpy(labels).long())


def _scaled(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).unsqueeze(1).float().div_(_PIXEL_LEVELS)


def _find(folder: Path, part: str, kind: str, dimensions: int) -> Path | None:
    # Some mirrors write a dot where the original has a hyphen.
    for joint in ("-", "."):
        for packing in ("", ".gz"):
            name = f"{part}-{kind}{joint}idx{dimensions}-ubyte{packing}"
            if (folder / name).is_file():
                return folder / name
    return None
