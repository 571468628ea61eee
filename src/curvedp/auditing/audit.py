"""``audit``: attack a run, and compare what the attack proves with what is claimed.

    result = audit(model, "cross-entropy", dataset, "dp-kfc", epsilon=3.0, delta=1e-5,
                   batch_size=256, epochs=10)
    print(result)

The model is copied and trained by the engine itself, as often as the method asks for:

==========  ====================================  ======================================
method      runs                                  the bound supposes
==========  ====================================  ======================================
one-run     one, with many canaries               nothing (Steinke et al. 2023)
runs        many, half of them with the canary    nothing (Clopper-Pearson); the fitted
                                                  bound: the claimed mechanism with any
                                                  noise
parallel    few, with many canaries; each is      the same, and that no canary's score
            counted as a run of its own           depends on another canary
==========  ====================================  ======================================

A bound above the claim proves the claim wrong, up to the confidence. A bound below it
proves nothing: a better attack may exist.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from curvedp.auditing.bounds import CONFIDENCE, Claim
from curvedp.auditing.canaries import Canaries, synthetic_canaries, with_canaries
from curvedp.auditing.evidence import LEAST_SCORES, Evidence, judge
from curvedp.auditing.one_run import Guesses, guess
from curvedp.auditing.result import AuditResult
from curvedp.auditing.witness import Witness
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.plan import Plan
from curvedp.recipes import Recipe, get_recipe
from curvedp.train import make_private
from curvedp.train.datasets import TrainingData
from curvedp.train.settings import PrivacySettings
from curvedp.values import is_whole

__all__ = ["METHODS", "SCORES", "audit"]

METHODS = ("one-run", "runs", "parallel")
SCORES = ("white-box", "black-box")

#: Canaries of one run, and runs with one canary, where nothing is said.
DEFAULT_CANARIES, DEFAULT_RUNS = 200, 200

#: More than anybody waits for, and than a machine holds beside the data.
MOST_CANARIES, MOST_RUNS = 100_000, 1_000_000

Loss = str | nn.Module | Callable[..., Any]


def audit(
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    recipe: Recipe | str = "dp-sgd",
    *,
    method: str = "one-run",
    score: str = "white-box",
    canaries: int | Canaries | Sequence[Any] | None = None,
    runs: int | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    unsafe_reproducible_noise: int | None = None,
    on_run: Callable[[int, int], None] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> AuditResult:
    """Attack training with a recipe; a lower bound on epsilon beside the claimed one.

    Args:
        model: any module; it is copied, and stays as it is.
        loss: name, torch loss or function ``(output, targets) -> [B]``.
        dataset: the other examples: map-style, or a ``DataLoader``.
        recipe: name or :class:`curvedp.Recipe`.
        method: "one-run", "runs" or "parallel"; see the module's docstring.
        score: "white-box": the attacker sees every release. "black-box": it sees the
            canaries' losses under the final model.
        canaries: how many to make up, or examples of your own as the dataset gives
            them. By default 200, and 1 for "runs".
        runs: training runs; by default 1, and 200 for "runs".
        confidence: that the bound is not too large.
        seed: of coins and canaries.
        unsafe_reproducible_noise: makes the runs' noise reproducible, for tests.
        on_run: called after each run with its number and their number.
        collate_fn: as for a ``DataLoader``.
        options: further arguments of :func:`curvedp.make_private`, such as ``probes``,
            ``labels`` or ``physical_batch_size``.
        **settings: privacy settings and those of the recipe, as for
            :class:`curvedp.Trainer`.

    Raises:
        NotPrivateError: the recipe claims nothing that could be audited.
    """
    started = time.monotonic()
    chosen = get_recipe(recipe)
    own = {
        n: settings.pop(n) for n in ["mode", *chosen.setting_names()] if n in settings
    }
    chosen = chosen.configure(**own)
    _check(chosen, method, score, runs, confidence)
    source = TrainingData.of(dataset, collate_fn)
    found_later = chosen.eigenvalues is not None  # a spectrum, and bands for it
    if found_later and chosen.correlation and chosen.correlation.bands == "auto":
        raise ConfigurationError(
            f"how many bands {chosen.name!r} takes depends on the spectrum of each "
            "run, and all runs of an audit have the same",
            "give bands, as a number",
        )
    plan = PrivacySettings.of(settings).plan(chosen, source.size)
    if plan.correlation is not None:  # as chosen for the plan, in every run
        chosen = chosen.configure(bands=plan.correlation.bands)
    if not isinstance(canaries, Canaries):
        canaries = _canaries(canaries, method, source, model, plan, seed)
    if method == "runs" and len(canaries) != 1:
        raise ConfigurationError(
            f"{len(canaries)} canaries, and the method 'runs' looks for one",
            'give one, or say method="parallel" if their scores are independent',
        )
    if method == "one-run" and len(canaries) < 2:
        raise ConfigurationError(
            f"{len(canaries)} canaries, and one run tells several apart",
            "use at least 2; some hundreds say more",
        )
    attack = _Attack(
        model, loss, source, chosen, plan, canaries, score, unsafe_reproducible_noise,
        dict(options or {}),
    )  # fmt: skip
    made = runs or (DEFAULT_RUNS if method == "runs" else 1)
    generator = np.random.default_rng([seed, 1])
    scores, coins = [], []
    for number in range(made):
        if method == "runs":
            included = np.array([number % 2 == 0])
        else:
            included = generator.random(len(canaries)) < 0.5
        scores.append(attack.run(number, included))
        coins.append(included)
        if on_run is not None:
            on_run(number + 1, made)
    flat, inside = np.concatenate(scores), np.concatenate(coins)
    claim = claim_of(plan)
    found: Guesses | Evidence
    if method == "one-run":
        found = guess(flat, inside, plan.delta, confidence)
        bound = found.epsilon
    else:
        found = judge(flat[inside], flat[~inside], claim, confidence=confidence)
        bound = found.best.epsilon
    return AuditResult(
        chosen.name, method, score, claim, bound, confidence, made, len(canaries),
        found, time.monotonic() - started, plan.sampling.steps,
    )  # fmt: skip


def claim_of(plan: Plan) -> Claim:
    """What a plan promises."""
    return Claim(
        plan.epsilon(),
        plan.delta,
        plan.noise_multiplier,
        plan.event_rate,
        plan.rounds,
        plan.relation,
    )


@dataclass(frozen=True)
class _Attack:
    """Everything that the runs of an audit have in common."""

    model: nn.Module
    loss: Loss
    source: TrainingData
    recipe: Recipe
    plan: Plan
    canaries: Canaries
    score: str
    unsafe: int | None
    options: dict[str, Any] = field(default_factory=dict)

    def run(
        self, number: int, included: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float64]:
        """Train once on the data and the canaries that are in; a score for each."""
        model = copy.deepcopy(self.model)
        items = self.canaries.chosen(included.tolist())
        parameters = [p for p in model.parameters() if p.requires_grad]
        private = make_private(
            model,
            self.recipe.make_optimiser(parameters),
            with_canaries(self.source.dataset, items),
            recipe=self.recipe,
            loss=self.loss,
            collate_fn=self.source.collate,
            loader_options=self.source.options,
            seed=number,
            unsafe_reproducible_noise=None
            if self.unsafe is None
            else self.unsafe + number,
            **_declared(self.plan),
            **self.options,
        )
        device = parameters[0].device
        batches = self.canaries.batches(self.source.collate, device)
        with private:
            witness = Witness(private, batches, first=self.source.size)
            seen = witness.watch()
            return seen if self.score == "white-box" else witness.losses()


def _declared(plan: Plan) -> dict[str, Any]:
    """The plan by its numbers, so that no run's noise or rate follows its own size.

    Where the size is public, an example that is zeroed out adds nothing to any sum, as
    one that is missing from a run with the same rate, steps and divisor.
    """
    replaced = plan.relation is Relation.REPLACE_ONE
    return {
        "noise_multiplier": plan.noise_multiplier,
        "delta": plan.delta,
        "sample_rate": plan.sampling.sample_rate,
        "steps": plan.sampling.steps,
        "expected_batch_size": plan.sampling.expected_batch_size,
        "relation": plan.relation if replaced else Relation.ADD_REMOVE,
        "accountant": plan.accountant,
        "allow_large_delta": True,
        "secure": plan.secure,
    }


def _canaries(
    wanted: int | Sequence[Any] | None,
    method: str,
    source: TrainingData,
    model: nn.Module,
    plan: Plan,
    seed: int,
) -> Canaries:
    replaced = plan.relation is Relation.REPLACE_ONE
    if wanted is None:
        wanted = 1 if method == "runs" else DEFAULT_CANARIES
    if isinstance(wanted, bool | float | str):
        raise ConfigurationError(
            f"canaries is {wanted!r}", "give their number, or the canaries"
        )
    if not isinstance(wanted, int):
        if replaced:
            raise ConfigurationError(
                "under replace-one every canary needs what stands in its place",
                "pass canaries=Canaries(items, replacements)",
            )
        return Canaries(wanted)
    if wanted < 0 or wanted > MOST_CANARIES:
        raise ConfigurationError(f"{wanted} canaries", f"use from 1 to {MOST_CANARIES}")
    generator = torch.Generator().manual_seed(seed)
    return synthetic_canaries(source, model, wanted, generator, replaced=replaced)


def _check(
    recipe: Recipe, method: str, score: str, runs: int | None, confidence: float
) -> None:
    if not recipe.private or recipe.oracle:
        raise NotPrivateError(
            f"the recipe {recipe.name!r} claims no epsilon with these settings",
            "audit a private recipe",
        )
    for what, value, known in (("method", method, METHODS), ("score", score, SCORES)):
        if value not in known:
            raise ConfigurationError(
                f"unknown {what} {value!r}", f"choose one of: {', '.join(known)}"
            )
    if not 0 < confidence < 1:
        raise ConfigurationError(
            f"confidence is {confidence!r}", "it is between 0 and 1, such as 0.95"
        )
    if runs is not None and not (is_whole(runs, 1) and runs <= MOST_RUNS):
        raise ConfigurationError(
            f"runs is {runs!r}", f"make at least one and at most {MOST_RUNS}"
        )
    if method == "runs" and runs is not None and runs < 2 * LEAST_SCORES:
        raise ConfigurationError(
            f"{runs} runs, half of them with the canary",
            f"make at least {2 * LEAST_SCORES}; some hundreds say more",
        )
    if method == "one-run" and runs not in (None, 1):
        raise ConfigurationError(
            f"the method 'one-run' makes one run, not {runs}",
            'say method="runs" or method="parallel" for several',
        )
