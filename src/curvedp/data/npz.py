"""Arrays in an ``.npz`` file: ``x``, ``y`` or ``x_train``, ``y_train`` and so on."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvedp.data.files import MAX_DEFLATE_RATIO, refuse_bomb, refuse_endless
from curvedp.data.schema import Range, parse_range
from curvedp.data.source import ArrayDataset, DataSource, Task, parse_task
from curvedp.errors import DataError
from curvedp.values import is_whole

__all__ = ["load_npz", "read_npz"]

_PIXEL_LEVELS = 255.0
_HEADER_ALLOWANCE = 1 << 16
_MAX_DIMENSIONS = 8
_TEST_ARRAYS = ("x_test", "y_test")
_ARRAYS = ("x", "y", "x_train", "y_train", *_TEST_ARRAYS)
_WRITE_AGAIN = "the file is damaged; write it again with numpy.savez_compressed"


def load_npz(
    path: Path,
    *,
    test: str | Path | None = None,
    task: str | Task | None = None,
    num_classes: int | None = None,
    target_range: object = None,
    with_test: bool = True,
) -> DataSource:
    """Load inputs and targets from numpy arrays; pickled objects are refused.

    Inputs of type uint8 are divided by 255. Inputs of a floating type are taken as they
    are, non-finite values too: training gives such an example no weight. Other integers
    have no declared range and are refused.

    Args:
        path: A file with ``x``, ``y`` or with ``x_train``, ``y_train`` and optionally
            ``x_test``, ``y_test``.
        test: Another file with ``x``, ``y`` (or ``x_test``, ``y_test``) for testing.
        task: ``classification`` when ``num_classes`` is given; otherwise
            ``regression`` or ``multi-label``.
        num_classes: The number of classes, declared because counting the labels would
            be a release.
        target_range: For regression, the declared range of the targets, which are then
            clamped and scaled. None takes them as they are.
        with_test: False reads neither the file ``test`` nor ``x_test``, ``y_test``.

    Raises:
        DataError: If the file, an array or the declaration is not usable.
    """
    if num_classes is not None and not is_whole(num_classes):
        raise DataError(
            f"{path}: num_classes is {num_classes!r}", "declare a whole number"
        )
    kind = _declared_task(path, task, num_classes)
    scale = None if target_range is None else parse_range("target_range", target_range)
    arrays = read_npz(path, leave_out=() if with_test else _TEST_ARRAYS)
    prefix = "_train" if "x_train" in arrays else ""
    train = _part(path, arrays, prefix, kind, scale)
    held_out: ArrayDataset | None = None
    if with_test and test is not None:
        test_path = Path(test)
        test_arrays = read_npz(test_path)
        test_prefix = "_test" if "x_test" in test_arrays else ""
        held_out = _part(test_path, test_arrays, test_prefix, kind, scale)
    elif "x_test" in arrays or "y_test" in arrays:
        held_out = _part(path, arrays, "_test", kind, scale)
    if kind is Task.CLASSIFICATION and num_classes is not None:
        num_outputs = num_classes
    else:
        num_outputs = train.targets.shape[1]
    is_pixels = arrays[f"x{prefix}"].dtype == np.uint8
    return DataSource(
        name=path.name,
        train=train,
        test=held_out,
        task=kind,
        num_outputs=num_outputs,
        input_shape=tuple(train.inputs.shape[1:]),
        facts={"format": "npz", "scaling": "pixels / 255" if is_pixels else "none"},
    )


def read_npz(
    path: Path, leave_out: tuple[str, ...] = (), most: int | None = None
) -> dict[str, np.ndarray]:
    """Read all arrays of an ``.npz`` file without pickle and with bounded memory.

    numpy allocates whatever an array's header claims before it reads, so the claim is
    first compared with the size of the archive's member.

    Args:
        path: The file.
        leave_out: Names of arrays that are not read.
        most: Bytes that they may unpack to, where that is known.

    Raises:
        DataError: If the archive or an array is damaged, or holds objects.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        refuse_endless(path)
        with zipfile.ZipFile(path) as archive:
            members = {}
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                name = member.filename.removesuffix(".npy")
                if name in members:
                    raise DataError(f"{path}: an array is there twice", _WRITE_AGAIN)
                members[name] = member
            wanted = {n: m for n, m in members.items() if n not in leave_out}
            for name, member in wanted.items():
                _refuse_impossible(_called(path, name), member)
            unpacked = sum(member.file_size for member in wanted.values())
            if most is not None and unpacked > most:
                raise DataError(f"{path}: larger than {most} bytes", _WRITE_AGAIN)
            refuse_bomb(path, unpacked, "if you trust it, pack it by numpy.savez")
            for name, member in wanted.items():
                arrays[name] = _read_member(path, archive, member)
    except (
        zipfile.BadZipFile,
        zlib.error,
        tokenize.TokenError,
        EOFError,
        OSError,
        RuntimeError,  # an encrypted member, or a packing that this Python lacks
        ValueError,
        TypeError,  # sizes that are no whole numbers
        MemoryError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            # their texts quote headers, and a damaged header may be a record
            f"{path}: cannot be read as .npz ({type(error).__name__})",
            "write it with numpy.savez_compressed",
        ) from error
    return arrays


def _called(path: Path, name: str) -> str:
    """An array as messages call it: by its name if that is one that is asked for."""
    return f"{path}: array {name!r}" if name in _ARRAYS else f"{path}: an array"


def _refuse_impossible(place: str, member: zipfile.ZipInfo) -> None:
    if member.file_size > member.compress_size * MAX_DEFLATE_RATIO + _HEADER_ALLOWANCE:
        raise DataError(f"{place} claims more than the file holds", _WRITE_AGAIN)


def _read_member(
    path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> np.ndarray:
    place = _called(path, member.filename.removesuffix(".npy"))
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise DataError(
                f"{place} has the unknown format version {version}", _WRITE_AGAIN
            )
        if dtype.kind not in "biuf":
            raise DataError(
                f"{place} has type {dtype.type.__name__}",
                "only plain numbers are read: objects are pickles, which run code",
            )
        if not all(is_whole(side) for side in shape) or len(shape) > _MAX_DIMENSIONS:
            raise DataError(f"{place} claims dimensions that none has", _WRITE_AGAIN)
        if math.prod(shape) * dtype.itemsize > member.file_size - stream.tell():
            raise DataError(f"{place} claims more than the file holds", _WRITE_AGAIN)
    with archive.open(member) as stream:
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def _declared_task(path: Path, task: str | Task | None, classes: int | None) -> Task:
    kind = Task.CLASSIFICATION if task is None and classes else task
    if kind is None:
        raise DataError(
            f"{path}: neither num_classes nor task is declared; counting the labels "
            "of private data would be a release",
            "declare num_classes=..., or task='regression' or task='multi-label'",
        )
    parsed = parse_task(kind)
    if (parsed is Task.CLASSIFICATION) != bool(classes and classes > 0):
        raise DataError(
            f"{path}: task {parsed.value!r} with num_classes={classes}",
            "declare num_classes for a classification, and for nothing else",
        )
    return parsed


def _part(
    path: Path,
    arrays: dict[str, np.ndarray],
    suffix: str,
    task: Task,
    scale: Range | None,
) -> ArrayDataset:
    for name in (f"x{suffix}", f"y{suffix}"):
        if name not in arrays or arrays[name].ndim == 0:
            raise DataError(
                f"{path}: there is no array {name!r}",
                "name the arrays x, y, or x_train, y_train, x_test, y_test",
            )
    x, y = arrays[f"x{suffix}"], arrays[f"y{suffix}"]
    if len(x) != len(y):
        raise DataError(
            f"{path}: x{suffix} and y{suffix} differ in length",
            "give one target for each input, along the first dimension",
        )
    return ArrayDataset(_inputs(path, x, suffix), _targets(path, y, task, scale))


def _inputs(path: Path, x: np.ndarray, suffix: str) -> Tensor:
    if x.ndim < 2:
        raise DataError(
            f"{path}: x{suffix} has {x.ndim} dimension",
            "inputs have at least two dimensions: examples and features",
        )
    if x.dtype == np.uint8:
        return torch.from_numpy(x).float().div_(_PIXEL_LEVELS)
    if x.dtype.kind == "f":
        # A float64 beyond float32's range becomes infinite here, which training treats
        # like any other non-finite example.
        with np.errstate(over="ignore"):
            return torch.from_numpy(x.astype(np.float32))
    raise DataError(
        f"{path}: x{suffix} has type {x.dtype}, whose range nobody declared",
        "store pixels as uint8, or scale to floats by a range known beforehand",
    )


def _targets(path: Path, y: np.ndarray, task: Task, scale: Range | None) -> Tensor:
    if task is Task.CLASSIFICATION:
        if y.dtype.kind not in "iu" or y.ndim != 1:
            raise DataError(
                f"{path}: labels have type {y.dtype} and {y.ndim} dimensions",
                "class labels are one integer for each example",
            )
        if y.dtype == np.uint64 and bool((y > np.iinfo(np.int64).max).any()):
            raise DataError(
                f"{path}: a label is too large", "labels lie in 0..num_classes-1"
            )
        return torch.from_numpy(y.astype(np.int64))
    columns = y[:, None] if y.ndim == 1 else y
    if columns.ndim != 2:
        raise DataError(
            f"{path}: targets have {y.ndim} dimensions", "use [examples, outputs]"
        )
    if task is Task.MULTI_LABEL and not bool(np.isin(columns, (0, 1)).all()):
        raise DataError(
            f"{path}: a multi-label target is neither 0 nor 1",
            "store one column of zeros and ones for each label",
        )
    if scale is not None:
        return torch.from_numpy(scale.scale_array(columns.astype(np.float64)))
    with np.errstate(over="ignore"):
        return torch.from_numpy(columns.astype(np.float32))
