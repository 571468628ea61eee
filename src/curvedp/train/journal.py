"""The journal of releases: what was paid for is never lost.

A release goes here before it moves the parameters, with the optimiser's settings of
that step (a schedule may have changed them). After a crash, the updates since the last
checkpoint are repeated from the journal: no private data is touched, no noise is drawn,
nothing is paid again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from curvedp.barrier import Release
from curvedp.errors import CheckpointError
from curvedp.noise import restore_release
from curvedp.storage import as_storage_error, write_atomically
from curvedp.train.encoding import decode_state, encode_state
from curvedp.train.tensors import read_tensors, write_tensors

__all__ = ["Journal"]


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
            "kind": "curvedp-release",
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
        """The release of a step and the optimiser's settings, or None."""
        path = self._path(step)
        if not path.exists():
            return None
        values, facts = read_tensors(path)
        if facts.get("kind") != "curvedp-release" or facts.get("step") != str(step):
            raise CheckpointError(
                f"{path} is not the journal entry of step {step}",
                "restore the run's folder from a copy",
            )
        release = restore_release(
            values, facts["frame"], step, noise_std=float(facts["noise_std"])
        )
        return release, decode_state(json.loads(facts["groups"]), {})

    def drop_before(self, step: int) -> None:
        """Forget releases that a checkpoint has made superfluous."""
        if not self._folder.exists():
            return
        with as_storage_error(self._folder, "tidy"):
            for path in self._folder.glob("step-*.safetensors"):
                if int(path.stem.removeprefix("step-")) < step:
                    path.unlink(missing_ok=True)
