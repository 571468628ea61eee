"""Workers: open a sweep, do its trials one after the other, and conclude.

Any number of processes may work on one sweep, from one folder or, with a storage that
all of them reach, from several machines. Each does a trial at a time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curvedp._version import __version__
from curvedp.accounting import read_ledger
from curvedp.errors import ConfigurationError, CurvedpError, StorageError
from curvedp.experiments.folder import refuse_existing
from curvedp.experiments.runs import (
    NOT_PRIVATE,
    RunResult,
    StopRequest,
    resume_run,
    train_run,
)
from curvedp.experiments.sweeps.budget import NOT_COUNTED, Prepared, prepare
from curvedp.experiments.sweeps.config import KIND, VERSION, SweepConfig, is_sweep
from curvedp.experiments.sweeps.results import SweepResult, conclude, trial_folder
from curvedp.experiments.sweeps.study import (
    Claimed,
    Study,
    Trial,
    default_storage,
    hidden,
)
from curvedp.locks import sole_writer
from curvedp.storage import clear_leftovers, read_json, write_json
from curvedp.train import Progress

__all__ = ["OpenSweep", "open_sweep", "resume_sweep", "sweep"]

#: Called with the number of a trial and how far its run is.
OnProgress = Callable[[int, Progress], None]
#: Called with the trials of other folders that are waited for.
OnWait = Callable[[list[Trial]], None]

_POLL = 0.5
#: Whoever opens a sweep loads its data and finds its noise meanwhile.
_PATIENCE = 600.0


@dataclass(frozen=True)
class OpenSweep:
    """A sweep with its study, ready to be worked on."""

    prepared: Prepared
    study: Study
    folder: Path

    def work(
        self,
        *,
        on_progress: OnProgress | None = None,
        on_wait: OnWait | None = None,
        stop: StopRequest | None = None,
    ) -> SweepResult | None:
        """Do trials until all have ended, and conclude.

        Returns:
            The result; None if it was asked to stop.
        """
        stop = stop or StopRequest()
        if self.prepared.counted is not None:
            facts = {"recipe": self.prepared.config.base.recipe, "curvedp": __version__}
            with _alone(self.folder):  # another worker may be about to do so
                self.prepared.counted.pay(self.folder, facts)
        while not stop.requested:
            with self.study.claimed() as claim:
                if claim is not None:
                    self._run(claim, on_progress, stop)
                    continue
            if self.study.is_complete():
                with _alone(self.folder):
                    self.study.clear_claims()
                    clear_leftovers(self.folder)
                    return conclude(self.study, self.prepared, self.folder)
            if on_wait is not None:
                on_wait(self.study.elsewhere())
            time.sleep(_POLL)
        return None

    def _run(
        self, claim: Claimed, on_progress: OnProgress | None, stop: StopRequest
    ) -> None:
        def report(progress: Progress) -> None:
            if on_progress is not None:
                on_progress(claim.number, progress)

        config = self.prepared.config
        try:
            run_config = config.trial_config(claim.settings, claim.number)
        except ConfigurationError as error:  # these settings do not go together
            self.study.refuse(claim.number, error.problem)
            return
        run_dir = trial_folder(self.folder, claim.number)
        options: dict[str, Any] = {
            "on_progress": report,
            "stop": stop,
            "notes": (self._note(),),
        }
        if (run_dir / "run.json").exists():
            device = config.base.device
            said = config.base.said_model
            result = resume_run(run_dir, device=device, model=said, **options)
        else:
            try:
                result = train_run(run_config, run_dir, **options)
            except ConfigurationError as error:
                if (run_dir / "run.json").exists():  # it has begun, or is another's
                    raise
                self.study.refuse(claim.number, error.problem)
                return
        if result.finished:
            self._tell(claim.number, result)

    def _tell(self, number: int, result: RunResult) -> None:
        score = result.metrics[self.prepared.config.metric]
        if not math.isfinite(score):
            self.study.refuse(number, f"its {self.prepared.config.metric} is {score}")
            return
        extra: dict[str, Any] = {}
        if result.seconds is not None:
            extra["seconds"] = round(result.seconds, 3)
        if result.facts is not None and result.run_dir is not None:
            header = read_ledger(result.run_dir / "ledger.jsonl").header
            extra["run_id"] = header.run_id
        self.study.finish(number, score, extra)

    def _note(self) -> str:
        counted = self.prepared.counted
        if counted is None:
            return f"a trial of a sweep; {NOT_COUNTED}"
        return (
            "a trial of a sweep that counts its tuning: the chosen model has the "
            f"sweep's guarantee, ({counted.epsilon:.4g}, {counted.plan.delta:g})-DP, "
            "and not the smaller epsilon of this run alone; a trial that was not "
            "chosen must not be shown"
        )


def sweep(
    config: SweepConfig,
    folder: Path,
    *,
    storage: str = "",
    study: str = "",
    on_progress: OnProgress | None = None,
    on_wait: OnWait | None = None,
    stop: StopRequest | None = None,
) -> SweepResult | None:
    """Open a sweep and work on it until it is finished.

    Args:
        config: of the sweep.
        folder: a new one, or that of the same sweep to go on with it or to help.
        storage: URL for studies that several machines share; SQLite in the folder by
            default.
        study: name of the study there.
        on_progress: called after every step of every trial.
        on_wait: called while others work on the last trials.
        stop: asks it to stop after the step in progress.

    Returns:
        The result; None if it was asked to stop.

    Raises:
        CurvedpError: something is refused.
    """
    opened = open_sweep(config, folder, storage=storage, study=study)
    return opened.work(on_progress=on_progress, on_wait=on_wait, stop=stop)


def open_sweep(
    config: SweepConfig,
    folder: Path,
    *,
    storage: str = "",
    study: str = "",
    target: float | None = None,
    seed_is_given: bool = True,
) -> OpenSweep:
    """Check everything, and make the study or join it. Nothing is trained.

    Args:
        config: of the sweep.
        folder: of this worker.
        storage: URL; empty for SQLite in the folder.
        study: name of the study; empty for one by data and recipe.
        target: the budget of a counted sweep whose noise was found before.
        seed_is_given: False takes over the seed of a study that is there.
    """
    if not is_sweep(folder):
        refuse_existing(folder)  # before a lock is put into what is not ours
    with _alone(folder):
        if is_sweep(folder):
            stored = _read(folder)
            storage, study = storage or stored["storage"], study or stored["study"]
        else:
            refuse_existing(folder)  # again: somebody may have been faster
        name = study or f"{Path(config.base.data).stem}-{config.base.recipe}"
        url = storage or default_storage(folder)
        if not seed_is_given:
            # of the study: the split, and so the size of its parts, follow from it
            seed = _seed_of_study(folder, url, name)
            config = config if seed is None else config.with_seed(seed)
        prepared = prepare(config, target)
        return _open(prepared, folder, storage, name)


def _open(prepared: Prepared, folder: Path, storage: str, name: str) -> OpenSweep:
    mine = not is_sweep(folder)
    if mine:
        _write(folder, prepared, storage, name)
    try:
        opened = Study.open(
            prepared.config,
            folder,
            url=storage or default_storage(folder),
            name=name,
            facts=prepared.facts(),
            number=_number_of(prepared.config),
        )
    except CurvedpError:
        if mine:
            _clear(folder)
        raise
    return OpenSweep(prepared, opened, folder)


def _seed_of_study(folder: Path, url: str, name: str) -> int | None:
    """The seed that is stored already; None for a study that is still to be made."""
    if is_sweep(folder):
        seed = _read(folder)["config"]["base"]["seed"]
    else:
        own_file = url == default_storage(folder)
        seed = None if own_file else Study.seed_of(url, name)
    return None if seed is None else int(seed)


def resume_sweep(
    folder: Path, *, device: str | None = None, model: str | None = None
) -> OpenSweep:
    """Open the sweep of a folder again, with the settings that it was made with.

    ``model`` repeats the folder's ``module:factory``, which is then imported.

    Raises:
        ConfigurationError: run.json is damaged, or the storage's password is not in it.
    """
    stored = _read(folder)
    config = SweepConfig.from_json(stored["config"])
    config = replace(config, base=config.base.repeating(model))
    if device is not None:
        config = replace(config, base=config.base.on(device))
    if stored["storage"] != hidden(stored["storage"]) or "***" in stored["storage"]:
        raise ConfigurationError(
            f"the password of {stored['storage']} is not stored",
            f"give curvedp sweep the same options again, with --run-dir {folder}",
        )
    return open_sweep(config, folder, target=stored["target"])


def _number_of(config: SweepConfig) -> Callable[[], int]:
    if config.repeats is not None:
        return config.repeats.draw
    return lambda: config.trials


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    try:
        stored = dict(read_json(file))
        if stored["kind"] != KIND or stored["version"] != VERSION:
            raise ValueError(f"it is a {stored['kind']} of {stored['version']}")
        SweepConfig.from_json(stored["config"])
        _ = stored["storage"], stored["study"], stored["target"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = getattr(error, "problem", str(error))
        raise ConfigurationError(
            f"{file} is damaged or foreign: {problem}", "restore it from a copy"
        ) from error
    return stored


def _write(folder: Path, prepared: Prepared, storage: str, study: str) -> None:
    content = {
        "kind": KIND,
        "version": VERSION,
        "curvedp": __version__,
        "config": prepared.config.to_json(),
        "target": None if prepared.counted is None else prepared.counted.target,
        "storage": hidden(storage),
        "study": study,
    }
    if not prepared.config.base.private:
        content["label"] = NOT_PRIVATE
    write_json(folder / "run.json", content)


def _clear(folder: Path) -> None:
    """Take back what a sweep that could not be opened has written."""
    with contextlib.suppress(OSError):
        (folder / "run.json").unlink()
    with contextlib.suppress(OSError):
        (folder / "study.db").unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock for a moment, waiting for other workers to let go."""
    deadline = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(sole_writer(folder))
                break
            except StorageError:
                raise
            except ConfigurationError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield
