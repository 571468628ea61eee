"""The journal of releases: what was paid for is never lost.

A release goes here before it moves the parameters, with the optimiser's settings of
that step (a schedule may have changed them). After a crash, the updates since the last
checkpoint are repeated from the journal: no private data is touched, no noise is drawn,
nothing is paid again.

An entry also holds the head of the ledger when it was written, so that a ledger which
was cut short is found, and checksums of all that, so that a flipped bit is found.

A lost release is made and paid for again, and so are those after it, whose gradients
were taken at parameters that nobody has any more. An entry that is damaged counts as
lost if it is the last one; if there are others after it they would be lost as well, so
it is refused by name, and whoever has no copy of it removes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.barrier import Release
from curvedp.errors import CheckpointError
from curvedp.noise import restore_release
from curvedp.storage import as_storage_error, clear_leftovers, write_atomically
from curvedp.train.encoding import decode_state, encode_state
from curvedp.train.tensors import read_facts, read_tensors, write_tensors

__all__ = ["Journal", "group_settings", "restore_group_settings"]

_KIND = "curvedp-release"
VERSION = "2"
_SINCE_2 = {"version", "ledger", "values", "seal"}  # version 1 has none of these
_NAMES = "step-*.safetensors"


class Journal:
    """Releases as files, ``<folder>/step-<number>.safetensors``.

    Args:
        folder: where the files are.
        ledger: the run's, whose lock is asked for before anything is changed; None to
            read only.
    """

    def __init__(
        self, folder: Path, ledger: Ledger | MemoryLedger | None = None
    ) -> None:
        self._folder = folder
        self._ledger = ledger

    def path(self, step: int) -> Path:
        """Where the release of a step is kept."""
        return self._folder / f"step-{step:08d}.safetensors"

    def write(self, release: Release, groups: list[dict[str, Any]]) -> None:
        """Store a release and the settings of the optimiser's parameter groups.

        Both are on disk when this returns.

        Raises:
            LedgerError: the ledger is closed: this process does not own the folder.
            StorageError: it could not be written.
        """
        ledger = self._owner()
        facts = {
            "kind": _KIND,
            "version": VERSION,
            "frame": release.frame,
            "step": str(release.step),
            "noise_std": repr(release.noise_std),
            "groups": json.dumps(encode_state(groups, {})),
            "ledger": json.dumps(ledger.head()),
            "values": _digest(release.values),
        }
        facts["seal"] = _seal(facts)
        write_atomically(
            self.path(release.step),
            lambda path: write_tensors(path, dict(release.values), facts),
        )

    def read(self, step: int) -> tuple[Release, list[dict[str, Any]]] | None:
        """The release of a step and the optimiser's settings; None if it is lost.

        Raises:
            CheckpointError: the entry is damaged, and there are others after it.
        """
        path = self.path(step)
        if not path.exists():
            return None
        try:
            values, facts = read_tensors(path)
            _check_facts(facts, step)
            if "values" in facts and facts["values"] != _digest(values):
                raise ValueError("its values do not match their checksum")
            release = restore_release(
                values, facts["frame"], step, noise_std=float(facts["noise_std"])
            )
            return release, decode_state(json.loads(facts["groups"]), {})
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            later = self.steps(step + 1)
            if not later:
                return None
            raise CheckpointError(
                f"the release in {path} cannot be used: "
                f"{getattr(error, 'problem', error)}",
                "restore a copy of that file; or remove it, and steps from "
                f"{step} to {later[-1]}, which were paid for, are made and paid for "
                "again",
            ) from error

    def head(self, step: int) -> tuple[int, str] | None:
        """Head of the ledger when the entry was written; None if it does not say.

        An entry of version 1 does not, nor one that is damaged or gone.
        """
        try:
            facts = read_facts(self.path(step))
            _check_facts(facts, step)
            seq, chain = json.loads(facts["ledger"])
            return int(seq), str(chain)
        except (CheckpointError, OSError, KeyError, TypeError, ValueError):
            return None

    def steps(self, first: int = 0) -> list[int]:
        """The steps from ``first`` on that have an entry, readable or not."""
        found = (p.stem.removeprefix("step-") for p in self._folder.glob(_NAMES))
        return sorted(int(n) for n in found if n.isdecimal() and int(n) >= first)

    def drop_from(self, step: int) -> None:
        """Forget the releases of steps that are made again."""
        self._owner()
        with as_storage_error(self._folder, "tidy"):
            for lost in reversed(self.steps(step)):  # never leave a gap
                self.path(lost).unlink(missing_ok=True)

    def drop_before(self, step: int) -> None:
        """Forget releases that a checkpoint on disk has made superfluous."""
        self._owner()
        clear_leftovers(self._folder)
        with as_storage_error(self._folder, "tidy"):
            for old in self.steps():
                if old < step:
                    self.path(old).unlink(missing_ok=True)

    def _owner(self) -> Ledger | MemoryLedger:
        """The ledger whose lock makes the folder ours, or it raises."""
        if self._ledger is None:
            raise TypeError("a journal without a ledger can only be read")
        self._ledger.require_open()
        return self._ledger


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, as they are now; public."""
    return [
        {k: _number(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    """A rate that is kept on a device, as a number."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def restore_group_settings(
    optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]
) -> None:
    """Set them as they were when a release was written."""
    groups = optimizer.param_groups
    fits = isinstance(settings, list) and len(settings) == len(groups)
    if not fits or not all(isinstance(s, dict) and "params" not in s for s in settings):
        raise CheckpointError(
            "a release in the journal has the settings of another optimiser",
            "build the optimiser as it was when the run began",
        )
    for group, stored in zip(groups, settings, strict=True):
        for name, value in stored.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)  # graphs know it by its place
            else:
                group[name] = value


def _check_facts(facts: Mapping[str, str], step: int) -> None:
    """Refuse a header that was changed, or that of another step."""
    if facts.get("kind") != _KIND or facts.get("step") != str(step):
        raise ValueError("it is not the release of that step")
    if not _SINCE_2 & set(facts):
        return  # version 1 has no checksums
    if facts.get("version") != VERSION:
        raise ValueError(f"it has the unknown version {facts.get('version')!r}")
    if facts.get("seal") != _seal(facts):
        raise ValueError("its header does not match its checksum")


def _seal(facts: Mapping[str, str]) -> str:
    """Checksum of the header without this field, as canonical JSON."""
    rest = {name: value for name, value in facts.items() if name != "seal"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(values: Mapping[str, Tensor]) -> str:
    """Checksum of tensors with their names, types and shapes, in order of names."""
    digest = hashlib.sha256()
    for name in sorted(values):
        tensor = values[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
