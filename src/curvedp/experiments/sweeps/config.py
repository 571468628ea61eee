"""What a sweep is: one recipe, what is fixed, what is searched, how trials are judged.

A sweep cannot open the test part of the data, for three reasons that do not depend on
each other: the path of a test file is taken out of the config before anything is stored
or built (:meth:`SweepConfig.__post_init__`); every trial is judged by validation, or is
refused; and a run that is judged by validation loads its data with ``with_test=False``
(:func:`curvedp.experiments.building.build_run`), by which loaders leave files and
arrays of the test part closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curvedp.accounting import Repeats
from curvedp.errors import ConfigurationError
from curvedp.experiments.config import RunConfig
from curvedp.recipes import Choice, Range, Recipe, SearchSpace, get_recipe
from curvedp.recipes.search import search_from_json
from curvedp.storage import read_json

__all__ = ["KIND", "SAMPLERS", "SweepConfig", "is_sweep"]

KIND, VERSION = "curvedp-sweep", 1
SAMPLERS = ("tpe", "random")
#: Settings of a run that may differ between the workers of one sweep.
_OF_THE_MACHINE = (
    "device", "cuda_graph", "compile", "physical_batch_size", "checkpoint_every"
)  # fmt: skip
_PATHS = ("data", "public_data", "validation_data")


@dataclass(frozen=True)
class SweepConfig:
    """A sweep, settled: what all its workers agree on.

    Attributes:
        base: what the trials share. Its recipe's settings are fixed in all of them.
        search: what is drawn, by setting; made by :meth:`make`.
        trials: their number, or the expected number if tuning is counted.
        sampler: "tpe" learns from earlier trials, "random" does not.
        repeats: the law of the number of trials if tuning is counted; None if not.
    """

    base: RunConfig
    search: SearchSpace
    trials: int = 20
    sampler: str = "tpe"
    repeats: Repeats | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _without_test(self.base))
        if isinstance(self.trials, bool) or self.trials < 1:
            raise ConfigurationError(
                f"the number of trials is {self.trials}", "use 1 or more"
            )
        if self.sampler not in SAMPLERS:
            raise ConfigurationError(
                f"unknown sampler {self.sampler!r}", f"choose: {', '.join(SAMPLERS)}"
            )
        self._check_judge()
        self._check_search()
        if self.repeats is not None:
            self._check_counted()

    @classmethod
    def make(
        cls,
        base: RunConfig,
        asked: SearchSpace | None = None,
        *,
        trials: int = 20,
        sampler: str | None = None,
        law: str | None = None,
    ) -> SweepConfig:
        """A sweep of what the recipe declares, and of what is asked for beside it.

        Args:
            base: of the runs; settings that it fixes are not searched.
            asked: search of the user, in place of the recipe's or beside it.
            trials: their number, or the expected number.
            sampler: by default "tpe", and "random" if tuning is counted.
            law: of the number of trials, if tuning is to be counted.
        """
        asked = dict(asked or {})
        fixed = dict(base.recipe_settings)
        both = sorted(asked.keys() & fixed.keys())
        if both:
            raise ConfigurationError(
                f"{both[0]} is fixed and searched", "leave out --set or --search"
            )
        recipe = get_recipe(base.recipe)
        declared = recipe.search_space(fixed.get("mode"))
        space = {
            name: where
            for name, where in declared.items()
            if name not in fixed and _has_effect(recipe, fixed, name, where)
        } | asked
        return cls(
            base=base.settled(),
            search=space,
            trials=trials,
            sampler=sampler or ("tpe" if law is None else "random"),
            repeats=None if law is None else Repeats(trials, law),
        )

    @property
    def metric(self) -> str:
        """What trials are compared by; "" until the task is known."""
        return self.base.metrics[0] if self.base.metrics else ""

    @property
    def larger_is_better(self) -> bool:
        """Whether the best score is the largest."""
        return self.metric != "loss"

    def trial_config(self, settings: Mapping[str, Any], number: int = 0) -> RunConfig:
        """The run of one trial.

        All trials start from the same weights and have the same validation part, so
        that they differ in their settings, sampling and noise alone.
        """
        noise = self.base.unsafe_reproducible_noise
        return replace(
            self.base,
            recipe_settings={**self.base.recipe_settings, **settings},
            unsafe_reproducible_noise=None if noise is None else noise + number,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_json` reads them back."""
        return {
            "base": self.base.to_json(),
            "search": {name: where.to_json() for name, where in self.search.items()},
            "trials": self.trials,
            "sampler": self.sampler,
            "repeats": None if self.repeats is None else self.repeats.facts(),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SweepConfig:
        """Read what :meth:`to_json` wrote."""
        search = {k: search_from_json(v) for k, v in stored["search"].items()}
        repeats = stored["repeats"]
        return cls(
            base=RunConfig.from_json(stored["base"]),
            search=search,
            trials=stored["trials"],
            sampler=stored["sampler"],
            repeats=None if repeats is None else Repeats.from_json(repeats),
        )

    def facts(self) -> dict[str, Any]:
        """What must be the same for all workers, as JSON values.

        Folders of files are left out: they differ from machine to machine.
        """
        facts = self.to_json()
        base = {k: v for k, v in facts["base"].items() if k not in _OF_THE_MACHINE}
        for name in _PATHS:
            base[name] = Path(base[name]).name
        return {**facts, "base": base}

    def with_seed(self, seed: int) -> SweepConfig:
        """The same sweep with the seed of the study that it joins."""
        return replace(self, base=replace(self.base, seed=seed))

    # -- checks -----------------------------------------------------------------------

    def _check_judge(self) -> None:
        if self.base.validation is None and not self.base.validation_data:
            raise ConfigurationError(
                "a sweep judges its trials by validation, and there is none (the test "
                "part is for the end, and a sweep cannot open it)",
                "give --validation 0.2 (a share of the training data), or "
                "--validation-data PATH (data that is declared public)",
            )

    def _check_search(self) -> None:
        recipe = get_recipe(self.base.recipe)
        names = recipe.setting_names()
        unknown = sorted(set(self.search) - set(names))
        if unknown:
            raise ConfigurationError(
                f"recipe {recipe.name!r} has no setting {unknown[0]!r} to search",
                f"its settings are: {', '.join(names)}",
            )
        if not self.search:
            raise ConfigurationError(
                "every setting is fixed, and there is nothing to search",
                "give --search learning_rate=log:0.01:1",
            )
        if "probe" in self.search and "oracle" in self.search["probe"].edges():
            raise ConfigurationError(
                "an oracle is searched: trials that take curvature from the private "
                "data have no guarantee, and a sweep speaks for all of them",
                "leave it out of --search, or make a sweep of its own with --set "
                "probe=oracle",
            )
        own = recipe.facts()
        for name, where in self.search.items():
            number = not isinstance(own[name], str | bool)
            if isinstance(where, Range) and not number:
                raise ConfigurationError(
                    f"{name} is no number, and {where.text()} is a range",
                    f"name its values: --search {name}=A,B",
                )
            whole = number and isinstance(own[name], int)
            if isinstance(where, Range) and whole and not where.of_whole_numbers():
                raise ConfigurationError(
                    f"{name} is a whole number, and {where.text()} is not a range of "
                    "these",
                    "give whole numbers for its ends",
                )
            for value in where.edges():  # types and least values, one by one
                beside = {**self.base.recipe_settings, name: value}
                recipe.configure(**beside) if _alone(own, name, value) else None

    def _check_counted(self) -> None:
        if self.sampler != "random":
            raise ConfigurationError(
                f"the sampler is {self.sampler!r}, and tuning can be counted only if "
                "every trial is drawn from the same law, whatever the others gave",
                "use --sampler random",
            )
        base = self.base
        if not base.private:
            raise ConfigurationError(
                "there is nothing to count: without tuning, too, these runs would have "
                "no guarantee (a reference, an oracle, or reproducible noise)",
                "leave out --count-tuning, or choose a private recipe",
            )
        if base.privacy.get("relation") == "replace-one":
            raise ConfigurationError(
                "tuning is counted for add-remove and zero-out, and the relation is "
                "replace-one",
                "use --relation zero-out",
            )
        correlation = base.configured_recipe().correlation
        if correlation is not None and (
            "bands" in self.search or correlation.bands == "auto"
        ):
            raise ConfigurationError(
                "trials with different numbers of bands cost differently, and tuning "
                "is counted by what one trial costs",
                "fix them: --set bands=4",
            )
        if base.privacy.get("accountant") not in (None, "rdp"):
            raise ConfigurationError(
                f"the accountant is {base.privacy['accountant']!r}, and only RDP "
                "knows the cost of the best of several trials",
                "use --accountant rdp",
            )


def is_sweep(folder: Path) -> bool:
    """Whether this is the folder of a sweep."""
    try:
        return bool(read_json(folder / "run.json")["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_whole_setting(recipe: str, name: str) -> bool:
    """Whether a setting is a whole number."""
    value = get_recipe(recipe).facts()[name]
    return isinstance(value, int) and not isinstance(value, bool)


def _alone(own: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a value can be judged by itself: others may belong to it.

    A clamp fixes other settings and a diagonal map has no rank, so that what is refused
    beside the defaults may be right beside what else is drawn.
    """
    return name not in ("clamp", "diagonal", "side", "rank", "probe", "labels")


def _without_test(base: RunConfig) -> RunConfig:
    """Without the test file; one that is given as validation data is refused."""
    test = base.data_options.get("test")
    if test is None:
        return base
    for name in ("validation_data", "public_data"):
        given = getattr(base, name)
        if given and Path(given).resolve() == Path(str(test)).resolve():
            raise ConfigurationError(
                f"{given} is the test file", f"give other data as {name}"
            )
    kept = {k: v for k, v in base.data_options.items() if k != "test"}
    return replace(base, data_options=kept)


def parse_search(texts: list[str], read: Any) -> dict[str, Range | Choice]:
    """``NAME=log:LOW:HIGH``, ``NAME=linear:LOW:HIGH`` or ``NAME=A,B`` as a space.

    Args:
        texts: one for each setting.
        read: from a text to a value, as everywhere on the command line.
    """
    space: dict[str, Range | Choice] = {}
    for text in texts:
        name, mark, where = text.partition("=")
        if not mark or not name or not where:
            raise ConfigurationError(
                f"--search {text!r}", "write NAME=log:0.01:1 or NAME=flat,normalised"
            )
        if name in space:
            raise ConfigurationError(f"--search names {name} twice", "name it once")
        space[name] = _parsed(text, where, read)
    return space


def _parsed(text: str, where: str, read: Any) -> Range | Choice:
    kind, *ends = where.split(":")
    if not ends:
        return Choice(tuple(read(v) for v in where.split(",") if v))
    if kind not in ("log", "linear") or len(ends) != 2:
        raise ConfigurationError(
            f"--search {text!r} is neither a range nor a choice",
            "write NAME=log:LOW:HIGH, NAME=linear:LOW:HIGH or NAME=A,B",
        )
    low, high = (read(end) for end in ends)
    return Range(low, high, log=kind == "log")


def _has_effect(
    recipe: Recipe, fixed: dict[str, Any], name: str, where: Range | Choice
) -> bool:
    """Whether the recipe takes all of a search beside what is fixed.

    The power of synthetic images, say, has no effect beside probes that are not
    synthetic, and is refused there.
    """
    try:
        for value in where.edges():
            recipe.configure(**{**fixed, name: value})
    except ConfigurationError:
        return False
    return True
