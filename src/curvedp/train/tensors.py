"""Tensors in safetensors files: no pickle, so that reading one runs no code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from curvedp.errors import CheckpointError, StorageError, missing_extra
from curvedp.storage import as_storage_error

__all__ = ["read_facts", "read_tensors", "write_tensors"]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]
) -> None:
    """Write tensors by name, with facts in the header."""
    safetensors = _safetensors()
    plain = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
    try:
        safetensors.torch.save_file(plain, str(path), metadata=dict(facts))
    except safetensors.SafetensorError as error:
        # it wraps the operating system's errors (a full disk) in its own type
        raise StorageError(
            f"cannot write {path}: {error}",
            "free some space on that disk, check its permissions, or choose another "
            "folder",
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and facts; a damaged file is refused by name."""
    with _opened(path) as file:
        facts = file.metadata() or {}
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def read_facts(path: Path) -> dict[str, str]:
    """The facts alone, however large the tensors are."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = _safetensors()
    with as_storage_error(path, "read"):
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                yield file
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{path} is damaged or not a safetensors file: {error}",
                "restore it from a copy, or resume from an older checkpoint",
            ) from error


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "checkpoints") from None
    return safetensors
