"""One entrance for all formats: a built-in name, a file or a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from curvedp.data.cifar import is_cifar_folder, load_cifar_folder, refuse_pickles
from curvedp.data.digits import load_digits
from curvedp.data.files import bare_suffix
from curvedp.data.idx import is_idx_folder, load_idx_folder
from curvedp.data.images import load_image_folder
from curvedp.data.npz import load_npz
from curvedp.data.scaling import normalised
from curvedp.data.schema import Schema
from curvedp.data.source import DataSource
from curvedp.data.table import load_table
from curvedp.errors import ConfigurationError, DataError, withheld

__all__ = ["FORMATS", "load"]

FORMATS: dict[str, Callable[..., DataSource]] = {
    "idx": load_idx_folder,
    "cifar": load_cifar_folder,
    "images": load_image_folder,
    "npz": load_npz,
    "table": load_table,
}
"""Loaders by format. Each takes a path and its own keyword options."""

_FOLDER_FORMATS = ("idx", "cifar", "images")
_TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")


def load(
    spec: str | Path,
    *,
    format: str | None = None,
    mean: Any = None,
    std: Any = None,
    with_test: bool = True,
    may_be_empty: bool = False,
    **options: Any,
) -> DataSource:
    """Load a data set by name or path.

    ======================================  ==========================================
    ``spec``                                options
    ======================================  ==========================================
    ``"digits"``                            none: comes with the package
    folder of IDX files (MNIST)             ``num_classes`` (10)
    folder of binary CIFAR batches          ``labels`` (``"fine"`` or ``"coarse"``)
    folder of image folders                 ``classes``, ``image_size``, ``channels``
    ``.npz``                                ``num_classes``, ``task``,
                                            ``target_range``, ``test``
    ``.csv``, ``.tsv``, ``.jsonl``,         ``schema``, or its fields ``target``,
    ``.ndjson`` (also ``.gz``, ``.xz``)     ``columns``, ``classes`` ..., and ``test``
    ======================================  ==========================================

    Args:
        spec: The name or the path.
        format: A key of :data:`FORMATS`, when the name does not show it.
        mean: Public constant that inputs are shifted by, or one for each channel.
        std: Public constant that they are then divided by, likewise.
        with_test: False leaves the test part alone: its file is not opened, its arrays
            are not read, and ``test`` of the result is None.
        may_be_empty: True takes a source without training examples. For a client of a
            federation, which must not tell that it has none.
        **options: What is declared about the data; see the loaders.

    Raises:
        DataError: If the data cannot be read, has no training examples, or lacks a
            declaration.
        ConfigurationError: If an option or a format is unknown.
    """
    with withheld(f"reading {spec}"):
        source = _load(spec, format, with_test, options)
    if len(source.train) == 0 and not may_be_empty:
        raise DataError(f"{source.name}: there are no examples", "is the path right?")
    return source if mean is None and std is None else normalised(source, mean, std)


def _load(
    spec: str | Path, format: str | None, with_test: bool, options: dict[str, Any]
) -> DataSource:
    if spec == "digits" and format is None:
        _refuse_unknown_options("digits", load_digits, options)
        return load_digits(with_test=with_test)
    path = Path(spec).expanduser()
    if not (path.is_file() or path.is_dir()):  # nor a pipe or a device
        raise DataError(
            f"{spec}: there is no such file or folder",
            "give a path, or the built-in name 'digits'",
        )
    chosen = _recognise(path) if format is None else format
    if not isinstance(chosen, str) or chosen not in FORMATS:
        raise ConfigurationError(
            f"unknown data format {chosen!r}", f"choose one of: {', '.join(FORMATS)}"
        )
    if path.is_dir() != (chosen in _FOLDER_FORMATS):
        kind = "folder" if chosen in _FOLDER_FORMATS else "file"
        raise DataError(
            f"{path}: the format {chosen!r} needs a {kind}",
            f"give a {kind}, or another format= ({', '.join(FORMATS)})",
        )
    if not isinstance(options.get("test", ""), str | Path):
        raise ConfigurationError(
            f"{path}: test is {options['test']!r}", "give the path of the test file"
        )
    loader = FORMATS[chosen]
    _refuse_unknown_options(chosen, loader, options)
    return loader(path, **({} if with_test else {"with_test": False}), **options)


def _recognise(path: Path) -> str:
    if path.is_dir():
        if is_idx_folder(path):
            return "idx"
        if is_cifar_folder(path):
            return "cifar"
        refuse_pickles(path)
        return "images"
    suffix = bare_suffix(path)
    if suffix == ".npz":
        return "npz"
    if suffix in _TABLE_SUFFIXES:
        return "table"
    if suffix in _PICKLE_SUFFIXES:
        raise DataError(
            f"{path}: pickled data is not read, because a pickle runs code",
            "save the arrays with numpy.savez_compressed(path, x=..., y=...)",
        )
    raise DataError(
        f"{path}: the format does not show in the name",
        f"rename the file, or pass format= one of: {', '.join(FORMATS)}",
    )


def _refuse_unknown_options(
    name: str, loader: Callable[..., DataSource], options: dict[str, Any]
) -> None:
    parameters = inspect.signature(loader).parameters.values()
    known = {item.name for item in parameters if item.kind is item.KEYWORD_ONLY}
    known.discard("with_test")  # of the caller, and nothing that is declared
    if loader is load_table:
        # The schema's fields may be given one by one; Schema itself reads them.
        known |= set(Schema.__dataclass_fields__)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigurationError(
            f"the data format {name!r} has no option {unknown[0]!r}",
            f"its options: {', '.join(sorted(known)) or 'none'}",
        )
