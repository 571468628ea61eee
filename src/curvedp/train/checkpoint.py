"""Checkpoints: a folder a step, whole or not there, without secrets and without pickle.

``<run>/checkpoints/step-00000120/`` holds ``model.safetensors`` (parameters and
buffers), ``state.safetensors`` and ``checkpoint.json``. All of it is a function of
releases and public settings, so a checkpoint may be shared: it holds no seed of noise
or sampling, no pending sum, no loss.

It also holds the head of the ledger, so that a ledger that was cut short is found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from curvedp.errors import CheckpointError
from curvedp.storage import (
    clear_leftovers,
    read_json,
    remove_folder,
    write_folder_atomically,
    write_json,
)
from curvedp.train.encoding import decode_state, encode_state
from curvedp.train.tensors import read_tensors, write_tensors

__all__ = [
    "Checkpoint",
    "checkpoint_folders",
    "kept_weight",
    "load_checkpoint",
    "read_head",
    "save_checkpoint",
]

KIND = "curvedp-checkpoint"
VERSION = 2
_UNSEALED = 1  # without a checksum of checkpoint.json; still read
_FILES = ("model.safetensors", "state.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on, besides its ledger and journal.

    Attributes:
        step: logical steps made.
        run_id: of the run; the same as in its ledger.
        facts: the plan and the recipe, to refuse a foreign checkpoint.
        model: parameters and buffers by name.
        state: optimiser, transforms and whatever the user added.
        ledger: head of the ledger (seq and chain) when it was made; None without one.
    """

    step: int
    run_id: str
    facts: dict[str, Any]
    model: dict[str, Tensor]
    state: dict[str, Any]
    ledger: tuple[int, str] | None = None


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> int:
    """Write ``<folder>/step-<number>``; older ones beyond ``keep`` are removed.

    Returns:
        The step of the oldest checkpoint that is kept: the journal must reach back to
        it, so that a damaged checkpoint can be removed without losing a step.
    """
    target = folder / f"step-{checkpoint.step:08d}"
    tensors: dict[str, Tensor] = {}
    state = encode_state(checkpoint.state, tensors)

    def write(path: Path) -> None:
        marks = {"kind": KIND, "run_id": checkpoint.run_id}
        write_tensors(path / _FILES[0], checkpoint.model, marks)
        write_tensors(path / _FILES[1], tensors, marks)
        content = {
            "kind": KIND,
            "version": VERSION,
            "run_id": checkpoint.run_id,
            "step": checkpoint.step,
            "facts": checkpoint.facts,
            "state": state,
            "ledger": _head_to_json(checkpoint.ledger),
            "sha256": {name: _digest(path / name) for name in _FILES},
        }
        content["seal"] = _seal(content)
        write_json(path / "checkpoint.json", content)

    clear_leftovers(folder)
    write_folder_atomically(target, write)
    for old in checkpoint_folders(folder)[:-keep]:
        remove_folder(old)
    return int(checkpoint_folders(folder)[0].name.removeprefix("step-"))


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint folder."""
    with _refusing(path):
        content = _read_content(path)
        for name in _FILES:
            if _digest(path / name) != content["sha256"][name]:
                raise _damaged(path, f"{name} does not match its checksum")
        model, _ = read_tensors(path / _FILES[0])
        tensors, _ = read_tensors(path / _FILES[1])
        return Checkpoint(
            step=content["step"],
            run_id=content["run_id"],
            facts=content["facts"],
            model=model,
            state=decode_state(content["state"], tensors),
            ledger=_head_from_json(content.get("ledger")),
        )


def read_head(path: Path) -> tuple[str, tuple[int, str] | None]:
    """Which run a checkpoint belongs to, and the head its ledger had; no tensors."""
    with _refusing(path):
        content = _read_content(path)
        return str(content["run_id"]), _head_from_json(content.get("ledger"))


def kept_weight(run: Path | None, name: str) -> Tensor | None:
    """A weight or buffer of a run's newest checkpoint that can be used, if it has one.

    Args:
        run: the run folder.
        name: of the parameter.
    """
    for path in [] if run is None else checkpoint_folders(run / "checkpoints")[::-1]:
        with suppress(CheckpointError):
            return load_checkpoint(path).model.get(name)
    return None


def _read_content(path: Path) -> dict[str, Any]:
    content = read_json(path / "checkpoint.json")
    if content["kind"] != KIND:
        raise _damaged(path, "it is not a curvedp checkpoint")
    if content["version"] not in (_UNSEALED, VERSION):
        raise _damaged(path, f"it has the unknown version {content['version']!r}")
    if content["version"] == _UNSEALED and "seal" in content:
        raise _damaged(path, "it has a seal, and version 1 has none")
    if content["version"] != _UNSEALED and content["seal"] != _seal(content):
        raise _damaged(path, "checkpoint.json does not match its checksum")
    return dict(content)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} cannot be used: {why}",
        "remove that folder to resume from the one before it, or restore a copy of it",
    )


def _head_to_json(head: tuple[int, str] | None) -> dict[str, Any] | None:
    return None if head is None else {"seq": head[0], "chain": head[1]}


def _head_from_json(head: dict[str, Any] | None) -> tuple[int, str] | None:
    return None if head is None else (head["seq"], head["chain"])


def _seal(content: dict[str, Any]) -> str:
    """Checksum of checkpoint.json without this field, as canonical JSON."""
    rest = {name: value for name, value in content.items() if name != "seal"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
