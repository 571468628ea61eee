"""What a sweep costs: noise of training and of scores, and what the choice adds.

Whoever is in the training part pays for training. Whoever is in a private validation
part pays for the scores. Nobody is in both, so the guarantee is the larger of the two
costs. If tuning is counted, each of them is the cost of repeat and select.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curvedp.accounting import (
    Event,
    GaussianEvent,
    Ledger,
    LedgerHeader,
    RDPAccountant,
    calibrate_selected_sigma,
    calibrate_sigma,
    repeated,
)
from curvedp.errors import ConfigurationError
from curvedp.experiments.building import BuiltRun, build_run
from curvedp.experiments.scores import SCORE_LEDGER
from curvedp.experiments.sweeps.config import SweepConfig
from curvedp.plan import Plan

__all__ = ["NOT_COUNTED", "Counted", "Prepared", "prepare"]

#: Said wherever a sweep speaks of epsilon and tuning is not in it.
NOT_COUNTED = (
    "tuning is not counted in epsilon: each epsilon is that of one run, and choosing "
    "among runs by their scores is a release of its own"
)


@dataclass(frozen=True)
class Counted:
    """The guarantee of a sweep whose tuning is counted.

    Attributes:
        epsilon: total, for the chosen model with its settings and its score.
        target: the budget; None if the noise was given.
        training: event of the selection for the training part.
        scores: for a private validation part; None if the scores cost nobody anything.
        plan: of one trial.
    """

    epsilon: float
    target: float | None
    training: Event
    scores: Event | None
    plan: Plan

    def pay(self, folder: Path, facts: dict[str, Any]) -> None:
        """Put the payments into the sweep's ledgers, unless they are there."""
        parts = {"ledger.jsonl": self.training, SCORE_LEDGER: self.scores}
        for name, event in parts.items():
            if event is None:
                continue
            part = "training" if event is self.training else "validation"
            path = folder / name
            with (
                Ledger.open(path)
                if path.exists()
                else Ledger.create(path, self._header({**facts, "part": part}))
            ) as ledger:
                if not ledger.count():
                    ledger.pay(0, 0, event)

    def _header(self, facts: dict[str, Any]) -> LedgerHeader:
        return LedgerHeader(
            run_id=uuid.uuid4().hex,
            relation=self.plan.relation,
            delta=self.plan.delta,
            target_epsilon=self.target,
            planned_steps=1,
            accountant="rdp",
            unit=self.plan.unit,
            facts=facts,
        )


@dataclass(frozen=True)
class Prepared:
    """A sweep that is ready: checked against its data, with its noise.

    Attributes:
        config: with metrics and noise filled in.
        built: the run of the recipe's defaults.
        plan: of one trial; None for a reference without a guarantee.
        counted: the total; None if tuning is not counted.
    """

    config: SweepConfig
    built: BuiltRun
    plan: Plan | None
    counted: Counted | None

    def facts(self) -> dict[str, Any]:
        """What workers must agree on beside the config."""
        if self.counted is None:
            return {"counted": None}
        total = {"epsilon": self.counted.epsilon, "target": self.counted.target}
        return {"counted": total}


def prepare(config: SweepConfig, target: float | None = None) -> Prepared:
    """Build the run once, and find the noise of training and of scores.

    Args:
        config: of the sweep.
        target: the budget of a sweep whose noise was found before.

    Raises:
        CurvedpError: data, model and settings do not fit; or no noise fits the budget.
    """
    if config.repeats is not None:
        target = config.base.privacy.get("epsilon", target)
        config = _with_selected_noise(config)
    built = build_run(config.trial_config({}))
    recipe = built.config.configured_recipe()
    if not recipe.private:
        return Prepared(_judged_by(config, built), built, None, None)
    plan = config.base.privacy_settings().plan(recipe, len(built.train))
    config = _with_paid_scores(config, plan, target)
    if config.base.validation_noise is not None:
        built = build_run(config.trial_config({}))  # refuses what noise does not fit
    config = _judged_by(config, built)
    counted = None if config.repeats is None else _count(config, plan, target)
    return Prepared(config, built, plan, counted)


def _judged_by(config: SweepConfig, built: BuiltRun) -> SweepConfig:
    """With the metrics that the task has, where none were asked for."""
    return replace(config, base=replace(config.base, metrics=built.metrics))


def _with_selected_noise(config: SweepConfig) -> SweepConfig:
    """The noise of a trial for a total budget, in place of a trial's own budget."""
    repeats = config.repeats
    assert repeats is not None
    privacy = {**config.base.privacy, "accountant": "rdp"}
    config = replace(config, base=replace(config.base, privacy=privacy))
    epsilon = privacy.pop("epsilon", None)
    if epsilon is None:
        return config
    if privacy.get("noise_multiplier") is not None:
        raise ConfigurationError(
            "both epsilon and noise_multiplier are given", "give one of them"
        )
    # any noise will do to learn what sampling and relation are declared
    stand_in = {**privacy, "noise_multiplier": 1.0}
    draft = replace(config.base, privacy=stand_in)
    built = build_run(draft)
    plan = draft.privacy_settings().plan(draft.configured_recipe(), len(built.train))
    sigma = calibrate_selected_sigma(
        epsilon,
        plan.delta,
        repeats=repeats,
        sample_rate=plan.event_rate,
        steps=plan.rounds,
        relation=plan.relation,
    )
    own = {**privacy, "noise_multiplier": sigma}
    return replace(config, base=replace(config.base, privacy=own))


def _with_paid_scores(
    config: SweepConfig, plan: Plan, target: float | None
) -> SweepConfig:
    """Noise on scores from private validation examples, as much as training is worth.

    What has no guarantee anyway, and what is declared public, is scored exactly.
    """
    base = config.base
    exact = base.validation is None or base.validation_is_public or not base.private
    if exact or base.validation_noise is not None:
        return config
    if config.repeats is None:
        noise = calibrate_sigma(
            _finite(plan.epsilon()),
            plan.delta,
            sample_rate=1.0,
            steps=1,
            relation=plan.relation,
            accountant=plan.accountant,
        )
    else:
        total = RDPAccountant().epsilon(_training(config, plan), *_promise(plan))
        noise = calibrate_selected_sigma(
            _finite(total if target is None else target),
            plan.delta,
            repeats=config.repeats,
            sample_rate=1.0,
            steps=1,
            relation=plan.relation,
        )
    return replace(config, base=replace(base, validation_noise=noise))


def _count(config: SweepConfig, plan: Plan, target: float | None) -> Counted:
    assert config.repeats is not None
    training, scores = _training(config, plan), None
    if config.base.validation_noise is not None:
        one = repeated(GaussianEvent(float(config.base.validation_noise)), 1)
        scores = config.repeats.event(one)
    accountant = RDPAccountant()
    events = [event for event in (training, scores) if event is not None]
    total = max(accountant.epsilon(event, *_promise(plan)) for event in events)
    if target is not None and total > target:
        raise ConfigurationError(
            f"with this noise the best of the trials costs epsilon {total:.4g}, and "
            f"the budget is {target:g}",
            "leave out validation_noise, or raise it",
        )
    return Counted(total, target, training, scores, plan)


def _training(config: SweepConfig, plan: Plan) -> Event:
    assert config.repeats is not None
    return config.repeats.event(plan.run_event())


def _promise(plan: Plan) -> tuple[Any, float]:
    return plan.relation, plan.delta


def _finite(epsilon: float) -> float:
    if not math.isfinite(epsilon):
        raise ConfigurationError(
            "with this little noise no epsilon holds, and none can be matched by noise "
            "on the scores",
            "give more noise, or judge trials by data that is declared public",
        )
    return epsilon
