"""The journal of releases: what was paid for is never lost.

A release goes here before it moves the parameters, with the optimiser's settings of
that step (a schedule may have changed them). After a crash, the updates since the last
checkpoint are repeated from the journal: no private data is touched, no noise is drawn,
nothing is paid again.

An entry that cannot be read is a release that was lost: its step is made and paid for
again, and so are those after it, whose gradients were taken at parameters that nobody
has any more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from curvedp.barrier import Release
from curvedp.errors import CheckpointError
from curvedp.noise import restore_release
from curvedp.storage import as_storage_error, clear_leftovers, write_atomically
from curvedp.train.encoding import decode_state, encode_state
from curvedp.train.tensors import read_tensors, write_tensors

__all__ = ["Journal"]

_KIND = "curvedp-release"
_NAMES = "step-*.safetensors"


class Journal:
    """Releases as files, ``<folder>/step-<number>.safetensors``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.safetensors"

    def write(self, release: Release, groups: list[dict[str, Any]]) -> None:
        """Store a release and the settings of the optimiser's parameter groups.

        Both are on disk when this returns.
        """
        facts = {
            "kind": _KIND,
            "frame": release.frame,
            "step": str(release.step),
            "noise_std": repr(release.noise_std),
            "groups": json.dumps(encode_state(groups, {})),
        }
        write_atomically(
            self._path(release.step),
            lambda path: write_tensors(path, dict(release.values), facts),
        )

    def read(self, step: int) -> tuple[Release, list[dict[str, Any]]] | None:
        """The release of a step and the optimiser's settings; None if there is none.

        Also if there is one that is torn, empty or foreign.
        """
        path = self._path(step)
        if not path.exists():
            return None
        try:
            values, facts = read_tensors(path)
            if facts["kind"] != _KIND or facts["step"] != str(step):
                return None
            release = restore_release(
                values, facts["frame"], step, noise_std=float(facts["noise_std"])
            )
            return release, decode_state(json.loads(facts["groups"]), {})
        except (CheckpointError, KeyError, TypeError, ValueError):
            return None

    def steps(self, first: int = 0) -> list[int]:
        """The steps from ``first`` on that have an entry, readable or not."""
        found = (p.stem.removeprefix("step-") for p in self._folder.glob(_NAMES))
        return sorted(int(n) for n in found if n.isdecimal() and int(n) >= first)

    def drop_from(self, step: int) -> None:
        """Forget the releases of steps that are made again."""
        with as_storage_error(self._folder, "tidy"):
            for lost in reversed(self.steps(step)):  # never leave a gap
                self._path(lost).unlink(missing_ok=True)

    def drop_before(self, step: int) -> None:
        """Forget releases that a checkpoint on disk has made superfluous."""
        clear_leftovers(self._folder)
        with as_storage_error(self._folder, "tidy"):
            for old in self.steps():
                if old < step:
                    self._path(old).unlink(missing_ok=True)
