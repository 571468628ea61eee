"""The study: which trials there are, who has which, and what they scored.

Optuna's storage is the one thing that workers share. A trial gets its number there, in
one transaction, so that no two workers have the same. On one machine a lock per trial
says whether its worker lives; the lock ends with its process, so whoever finds a trial
that runs and is not locked goes on with it.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from curvedp.errors import (
    ConfigurationError,
    CurvedpError,
    StorageError,
    missing_extra,
)
from curvedp.experiments.sweeps.config import SweepConfig, is_whole_setting
from curvedp.experiments.sweeps.files import refuse_foreign_file
from curvedp.locks import sole_writer
from curvedp.recipes import Choice
from curvedp.values import is_whole

__all__ = ["Claimed", "Study", "Trial", "default_storage", "hidden"]

_FACTS, _CLAIMS = "curvedp", ".claims"
_PLACE, _REASON, _EXTRA = "place", "reason", "extra"
#: A worker writes where it works right after it got a trial; whoever has not for this
#: long was killed in between.
_ORPHANED_AFTER = 60.0
#: How long to wait for another worker that makes the study at this moment.
_PATIENCE = 30.0
#: Seconds that SQLite waits for another process's write.
_BUSY = 60.0
_OPENINGS = 5
#: What optuna raises over rows that it did not write.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Trial:
    """A trial as the study knows it.

    Attributes:
        number: from 0.
        state: "running", "finished" or "refused".
        settings: what was drawn.
        score: of a finished one.
        place: machine and folder of its worker.
        reason: why it was refused.
        extra: what its worker left beside the score.
    """

    number: int
    state: str
    settings: dict[str, Any]
    score: float | None
    place: str | None
    reason: str = ""
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Claimed:
    """A trial that this process alone works on."""

    number: int
    settings: dict[str, Any]


def default_storage(folder: Path) -> str:
    """The study's file in the sweep's folder."""
    return f"sqlite:///{(folder / 'study.db').absolute()}"


def hidden(url: str) -> str:
    """A storage URL without its passwords, in the login or in the query."""
    url = re.sub(r"(?i)([?&][^=&#]*(?:password|passwd|pwd)=)[^&#]*", r"\1***", url)
    head, mark, rest = url.partition("://")
    login, at, host = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{head}{mark}{user}{colon and ':***'}{at}{host}" if at else url


class Study:
    """An open study. Made by :meth:`open`."""

    def __init__(
        self, study: Any, config: SweepConfig, folder: Path, url: str, number: int
    ) -> None:
        self._study = study
        self._url = url
        self._number = number
        self.config = config
        self.folder = folder
        self.place = f"{socket.gethostname()}:{folder.resolve()}"

    @classmethod
    def open(
        cls,
        config: SweepConfig,
        folder: Path,
        *,
        url: str,
        name: str,
        facts: Mapping[str, Any],
        number: Callable[[], int],
    ) -> Study:
        """Make the study, or join the one that is there.

        Args:
            config: of the sweep.
            folder: where this worker's trials are.
            url: of the storage.
            name: of the study there.
            facts: what the workers must agree on beside the config, JSON values.
            number: draws the number of trials; called once for a study, by the worker
                that makes it, and before there is a trial.

        Raises:
            ConfigurationError: the study was made with other settings.
            StorageError: the storage cannot be opened.
        """
        optuna = _optuna()
        with _storage_errors(url):
            storage = _open_storage(optuna, url)
            study, mine = _create_or_load(optuna, storage, name, config, folder, url)
            if mine and _FACTS not in study.user_attrs:
                # one value, written at once: there, or not there
                own = {**config.facts(), **facts}
                study.set_user_attr(_FACTS, {"facts": own, "trials": number()})
            stored = _wait_for_facts(study, name, url)
        _refuse_other(stored["facts"], {**config.facts(), **facts}, name)
        return cls(study, config, folder, url, int(stored["trials"]))

    @staticmethod
    def seed_of(url: str, name: str) -> int | None:
        """The seed of a study that is there; None if there is none."""
        optuna = _optuna()
        with _storage_errors(url):
            storage = _open_storage(optuna, url)
            if name not in optuna.get_all_study_names(storage):
                return None
            study = optuna.load_study(study_name=name, storage=storage)
            facts = _wait_for_facts(study, name, url)["facts"]
        return int(facts["base"]["seed"])

    def trials(self) -> list[Trial]:
        """All trials of the sweep so far, by number."""
        with _storage_errors(self._url):
            found = self._study.get_trials(deepcopy=False)
        return [_trial(t, self.config) for t in found if t.number < self._number]

    def is_complete(self) -> bool:
        """Whether every trial has ended."""
        found = self.trials()
        ended = [t for t in found if t.state != "running"]
        return len(ended) == self._number

    @contextmanager
    def claimed(self) -> Iterator[Claimed | None]:
        """A trial to work on, for this process alone; None if there is none now.

        First those whose worker has died, then a new one.
        """
        with contextlib.ExitStack() as held:
            claim = self._take_over(held) or self._take_new(held)
            yield claim

    def finish(self, number: int, score: float, extra: Mapping[str, Any]) -> None:
        """Tell how a trial ended. One that has ended stays as it is."""
        with _storage_errors(self._url):
            self._set(number, _EXTRA, dict(extra))
            self._study.tell(number, score, skip_if_finished=True)

    def refuse(self, number: int, reason: str) -> None:
        """Tell that a trial's settings do not go together, or led nowhere."""
        from optuna.trial import TrialState

        with _storage_errors(self._url):
            self._set(number, _REASON, reason)
            self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def elsewhere(self) -> list[Trial]:
        """Running trials of other folders."""
        return [
            t
            for t in self.trials()
            if t.state == "running" and t.place not in (None, self.place)
        ]

    def clear_claims(self) -> None:
        """Remove the locks that killed workers left, when every trial has ended."""
        shutil.rmtree(self.folder / "trials" / _CLAIMS, ignore_errors=True)

    # -- claims -----------------------------------------------------------------------

    def _take_over(self, held: contextlib.ExitStack) -> Claimed | None:
        for trial in self.trials():
            if trial.state != "running" or not self._is_mine(trial):
                continue
            if self._lock(held, trial.number):
                if self._frozen(trial.number).state.is_finished():
                    held.close()  # its worker was just done
                    continue
                return self._settled(trial.number)
        return None

    def _take_new(self, held: contextlib.ExitStack) -> Claimed | None:
        while True:
            with _storage_errors(self._url):
                if len(self._study.get_trials(deepcopy=False)) >= self._number:
                    return None
                number = self._study.ask().number
            if number >= self._number:  # somebody was faster; it is nobody's trial
                self.refuse(number, "beyond the number of trials")
                return None
            if self._lock(held, number):
                return self._settled(number)
            # another worker found it before it was locked, and works on it

    def _is_mine(self, trial: Trial) -> bool:
        if trial.place is not None:
            return trial.place == self.place
        started = self._frozen(trial.number).datetime_start
        age = 0.0 if started is None else (datetime.now() - started).total_seconds()
        own_file = self._url == default_storage(self.folder)
        return own_file or age > _ORPHANED_AFTER

    def _lock(self, held: contextlib.ExitStack, number: int) -> bool:
        lock = sole_writer(self.folder / "trials" / _CLAIMS / f"{number:05d}")
        try:
            held.enter_context(lock)
        except StorageError:
            raise
        except ConfigurationError:  # another process has it
            return False
        return True

    def _settled(self, number: int) -> Claimed:
        """The claim with all its settings, drawn now if they were not before."""
        import optuna

        with _storage_errors(self._url):
            frozen = self._frozen(number)
            self._study.sampler = _sampler(optuna, self.config, number)
            trial = optuna.trial.Trial(self._study, frozen._trial_id)
            if trial.user_attrs.get(_PLACE) != self.place:
                trial.set_user_attr(_PLACE, self.place)
            for name, where in self.config.search.items():
                if isinstance(where, Choice):
                    trial.suggest_categorical(name, list(where.values))
                elif is_whole_setting(self.config.base.recipe, name):
                    trial.suggest_int(
                        name, int(where.low), int(where.high), log=where.log
                    )
                else:
                    trial.suggest_float(name, where.low, where.high, log=where.log)
            return Claimed(number, _settings(trial.params, self.config))

    def _frozen(self, number: int) -> Any:
        with _storage_errors(self._url):
            found = self._study.get_trials(deepcopy=False)
        return next(t for t in found if t.number == number)

    def _set(self, number: int, name: str, value: Any) -> None:
        import optuna

        trial = self._frozen(number)
        if not trial.state.is_finished():
            live = optuna.trial.Trial(self._study, trial._trial_id)
            live.set_user_attr(name, value)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise missing_extra("optuna", "sweep") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open_storage(optuna: Any, url: str) -> Any:
    refuse_foreign_file(url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite:"):
        options = {"connect_args": {"timeout": _BUSY}}
    for _ in range(_OPENINGS - 1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except Exception as error:
            if "already exists" not in str(error):
                raise
            time.sleep(0.2)  # another worker makes its tables at this moment
    return optuna.storages.RDBStorage(url, engine_kwargs=options)


def _create_or_load(
    optuna: Any, storage: Any, name: str, config: SweepConfig, folder: Path, url: str
) -> tuple[Any, bool]:
    """The study, and whether it is for this process to write its facts.

    It is if it made the study; or if the storage is the folder's own, whose lock the
    caller holds, and a process was killed before it had written them.
    """
    sampler = _sampler(optuna, config, 0)
    pruner = optuna.pruners.NopPruner()
    kind = {"sampler": sampler, "pruner": pruner, "storage": storage}
    try:
        direction = "minimize" if config.metric == "loss" else "maximize"
        made = optuna.create_study(study_name=name, direction=direction, **kind)
        return made, True
    except optuna.exceptions.DuplicatedStudyError:
        found = optuna.load_study(study_name=name, **kind)
        return found, url == default_storage(folder)


def _wait_for_facts(study: Any, name: str, url: str) -> dict[str, Any]:
    deadline = time.monotonic() + _PATIENCE
    while _FACTS not in study.user_attrs:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"the study {name!r} in {hidden(url)} was not made by curvedp sweep, "
                "or whoever made it was killed at that moment",
                "choose another --study",
            )
        time.sleep(0.2)
    found = study.user_attrs[_FACTS]
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("facts"), dict)
        or not is_whole(found.get("trials"))
    ):
        raise ConfigurationError(
            f"the study {name!r} in {hidden(url)} was not made by curvedp sweep",
            "choose another --study",
        )
    return found


def _refuse_other(stored: Mapping[str, Any], own: Mapping[str, Any], name: str) -> None:
    def flat(facts: Mapping[str, Any]) -> dict[str, Any]:
        top = {k: v for k, v in facts.items() if k != "base"}
        return top | dict(facts.get("base", {}))

    there, here = flat(stored), flat(own)
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            raise ConfigurationError(
                f"the study {name!r} was made with other settings: {key} is "
                f"{there.get(key)!r} there, and {here.get(key)!r} here",
                "give the same settings to join it, or choose another --run-dir or "
                "--study",
            )


def _sampler(optuna: Any, config: SweepConfig, number: int) -> Any:
    """The sampler of one trial.

    By its number, so that two workers never draw alike, and the same trial is drawn
    alike after a crash. If tuning is counted the draws are as secret as the noise: they
    come from the operating system.
    """
    if config.repeats is not None:
        return optuna.samplers.RandomSampler()
    seed = ((config.base.seed or 0) * 1_000_003 + number) % 2**32
    if config.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _trial(frozen: Any, config: SweepConfig) -> Trial:
    from optuna.trial import TrialState

    states = {TrialState.COMPLETE: "finished", TrialState.FAIL: "refused"}
    return Trial(
        number=frozen.number,
        state=states.get(frozen.state, "running"),
        settings=_settings(frozen.params, config),
        score=frozen.value,
        place=frozen.user_attrs.get(_PLACE),
        reason=frozen.user_attrs.get(_REASON, ""),
        extra=frozen.user_attrs.get(_EXTRA),
    )


def _settings(drawn: Mapping[str, Any], config: SweepConfig) -> dict[str, Any]:
    """Drawn numbers with four digits, which a person can type again."""
    settings = {}
    for name, where in config.search.items():
        if name not in drawn:
            continue
        value = drawn[name]
        if not isinstance(where, Choice) and isinstance(value, float):
            value = min(max(_short(value), where.low), where.high)
        settings[name] = value
    return settings


def _short(value: float) -> float:
    return value if not math.isfinite(value) else float(f"{value:.4g}")


@contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """What the storage raises, as one message; a password is not in it."""
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except CurvedpError:
        raise
    except (SQLAlchemyError, OptunaError, ImportError, *_UNREADABLE) as error:
        first = (str(error.__cause__ or error).strip().splitlines() or [""])[0]
        first = first[:200] or type(error).__name__
        raise StorageError(
            f"the study's storage {hidden(url)} cannot be used: {first}",
            "give a URL such as sqlite:///study.db or postgresql://user@host/name, "
            "whose driver is installed and whose folder or server is there",
        ) from error
