"""The secret of a run with correlated noise: kept apart, for as long as it goes on.

Independent noise needs nothing of the past: a resumed run takes fresh entropy. With
correlated noise, later steps take back what earlier ones added, and examples keep their
groups. Both follow from the entropy of the run's earlier sittings.

``<run>/secret.json`` holds it. **Whoever has this file and the releases can compute the
private sums.** It is readable by its owner alone, in no checkpoint, and removed with
the last step. A run that is resumed without it goes on: noise begins a new block, and
groups are drawn anew, which costs a part of the budget (fewer steps are left).

Every sitting draws its new noise with entropy of its own, so that no noise is used
twice even where a run's folder was restored from a copy.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.errors import CheckpointError, StorageError
from curvedp.noise import RandomStreams
from curvedp.storage import as_storage_error, json_text, read_json, write_atomically
from curvedp.values import is_whole

__all__ = ["RunSecret", "drawing_device"]

KIND = "curvedp-secret"
NAME = "secret.json"
_WARNING = (
    "SECRET: with this file, the releases of the run are its private sums. Do not "
    "copy or share it. It is removed when the run ends."
)


_ENTROPY = re.compile("[0-9a-f]{64}")


def drawing_device(device: torch.device) -> str:
    """What draws noise, by a name: another one draws other numbers from one seed.

    torch deals the numbers of a large tensor out to as many threads as a GPU has, so
    GPUs of two models do not draw alike either.
    """
    if device.type != "cuda":
        return device.type
    return f"{device.type} {torch.cuda.get_device_name(device)}"


@dataclass
class _Sitting:
    """A process that worked on the run.

    Attributes:
        entropy: of its noise and sampling.
        payments: that the ledger had when it began.
        device: what drew its noise, as :func:`drawing_device` names it.
        joined: whether its noise continues the block of the sitting before.
    """

    entropy: int = field(repr=False)
    payments: int
    device: str
    joined: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "entropy": f"{self.entropy:064x}",
            "payments": self.payments,
            "device": self.device,
            "joined": self.joined,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> _Sitting:
        """Read back what :meth:`to_json` wrote; nothing else."""
        entropy, payments, joined = data["entropy"], data["payments"], data["joined"]
        device = data.get("device", "")
        if not (isinstance(entropy, str) and _ENTROPY.fullmatch(entropy)):
            raise ValueError("the entropy of a sitting is not 64 digits")
        if not is_whole(payments) or not isinstance(joined, bool):
            raise ValueError("the payments of a sitting are not counted")
        if not isinstance(device, str):
            raise ValueError("the device of a sitting is not a word")
        return cls(int(entropy, 16), payments, device, joined)


class RunSecret:
    """The entropy of all sittings of a run, in its folder; or of this one, in memory.

    Args:
        run_dir: the run's folder; None keeps nothing.
        streams: of this sitting; they are told what the earlier ones drew.
        ledger: open, so that the folder is ours.
        device: what draws noise, as :func:`drawing_device` names it.

    Raises:
        CheckpointError: the file is there and cannot be read.
        StorageError: it could not be written.
    """

    def __init__(
        self,
        run_dir: Path | None,
        streams: RandomStreams,
        ledger: Ledger | MemoryLedger,
        device: str = "cpu",
    ) -> None:
        # reproducible noise has its entropy from a number
        kept = run_dir is not None and not streams.is_unsafe
        self._path = run_dir / NAME if run_dir is not None and kept else None
        self._run_id = ledger.header.run_id
        self._ledger = ledger
        self._sittings = self._read()
        own = _Sitting(streams.reveal_secret(), ledger.count(), device)
        self._sittings.append(own)
        if len(self._sittings) > 1:
            streams.continue_run(self._sittings[0].entropy, self._entropies())
        self._write()

    def joined(self) -> None:
        """This sitting's noise continues the block of the one before."""
        self._sittings[-1].joined = True
        self._write()

    def forget(self) -> None:
        """Remove it: no further noise of this run will be drawn."""
        if self._path is not None:
            with as_storage_error(self._path, "remove"):
                self._path.unlink(missing_ok=True)

    def covers(self, first: int, stop: int) -> bool:
        """Whether the noise of these steps is one block, and its entropy known.

        So it is if each was paid for once, every sitting since the first of them has
        continued the noise of the one before, and this one would draw it alike.
        """
        places = {p.step: k for k, p in enumerate(self._ledger.payments())}
        steps = range(first, stop)
        if any(self._ledger.next_attempt(step) != 1 for step in steps):
            return False
        own = self._sittings[-1]
        before = [p for p in map(places.__getitem__, steps) if p < own.payments]
        payers = [self._payer(place) for place in before]
        if any(payer is not None and payer.device != own.device for payer in payers):
            return False
        apart = [s.payments for s in self._sittings[:-1] if not s.joined]
        return bool(steps) and places[first] >= max(apart, default=0)

    def _entropies(self) -> dict[int, int]:
        """By step: that of the last sitting which may have paid for it."""
        found = {}
        for place, payment in enumerate(self._ledger.payments()):
            payer = self._payer(place)
            if payer is not None:
                found[payment.step] = payer.entropy
        return found

    def _payer(self, place: int) -> _Sitting | None:
        """The last of the earlier sittings that may have made a payment."""
        earlier = [s for s in self._sittings[:-1] if s.payments <= place]
        return earlier[-1] if earlier else None

    def _read(self) -> list[_Sitting]:
        if self._path is None or not self._path.exists():
            return []
        try:
            content = read_json(self._path)
            if content["kind"] != KIND:
                raise ValueError("it is not the secret of a run")
            sittings = [_Sitting.from_json(s) for s in content["sittings"]]
            own = content["run_id"] == self._run_id
        except (StorageError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._path} cannot be used: {_why(error)}",
                "restore it; or remove it, and the run goes on with a new block of "
                "noise and new groups, which costs a part of its budget",
            ) from error
        # that of another run is of no use, and must never be used again
        return sittings if own else []

    def _write(self) -> None:
        if self._path is None:
            return
        content = {
            "kind": KIND,
            "warning": _WARNING,
            "run_id": self._run_id,
            "sittings": [s.to_json() for s in self._sittings],
        }

        def write(file: Path) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(
                os.open(file, flags, 0o600), "w", encoding="utf-8"
            ) as opened:
                opened.write(json_text(content))

        write_atomically(self._path, write)

    def __repr__(self) -> str:
        return f"RunSecret({len(self._sittings)} sittings, entropy=<secret>)"


def _why(error: Exception) -> str:
    """In words that quote nothing of the file, which is a secret."""
    if isinstance(error, StorageError):
        return error.problem
    if isinstance(error, KeyError | TypeError):
        return "it is not the secret of a run"
    return "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
