r"""A design of correlated noise, judged: what it costs, and what is left of the noise.

All of it is public: steps, rates and a workload, no data.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from curvedp.accounting import (
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    calibrate_sigma,
    get_accountant,
    repeated,
)
from curvedp.accounting._validate import check_delta, check_noise
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, missing_extra
from curvedp.noise.design import LARGEST_DENSE, Design, designs_folder, error_of
from curvedp.noise.strategies import Participation, Strategy, Workload
from curvedp.noise.strategies.workloads import Floats
from curvedp.plan import Correlation, SamplingPlan
from curvedp.plan.correlation import best_bands, group_rate
from curvedp.storage import write_atomically
from curvedp.values import is_whole

__all__ = ["DesignQuestion", "DesignReport", "design_noise", "plot_design"]

_OWN, _PLAIN, _INK = "#2b6cb0", "#8a9099", "#1f2933"


@dataclass(frozen=True)
class DesignQuestion:
    """What a design is asked for.

    Attributes:
        kind: "banded", "toeplitz" or "blt".
        steps: T.
        bands: b, or "auto"; of a buffered strategy, its buffers.
        workload: what the noise is to be small in.
        sample_rate: chance of an example to be in a step's batch; None where it is not
            known, and then there is no epsilon.
        epsilon: target, to calibrate sigma; or
        sigma: given.
        delta: of (epsilon, delta).
        relation: which datasets are neighbours.
        separation: least steps between two participations under a buffered strategy,
            which has no amplification by sampling; by default an example takes part
            once.
        parameters: of the model, for its memory; 0 if not known.
    """

    kind: str
    steps: int
    bands: int | str
    workload: Workload
    sample_rate: float | None = None
    epsilon: float | None = None
    sigma: float | None = None
    delta: float = 1e-5
    relation: Relation = Relation.ADD_REMOVE
    separation: int | None = None
    parameters: int = 0

    def __post_init__(self) -> None:
        if self.epsilon is not None and self.sigma is not None:
            raise ConfigurationError(
                "both epsilon and sigma are given", "give one of them"
            )
        if self.sigma is not None:
            check_noise(self.sigma)
        check_delta(self.delta)
        if self.separation is not None and self.kind != "blt":
            raise ConfigurationError(
                f"separation is for the strategy 'blt'; under {self.kind!r} an example "
                "takes part at most once in as many steps as there are bands",
                "leave --separation out",
            )
        if self.kind == "blt" and self.steps > LARGEST_DENSE:
            raise ConfigurationError(
                f"a buffered strategy for {self.steps} steps is judged by a matrix of "
                f"{self.steps} x {self.steps} numbers",
                f"use the strategy 'toeplitz', or up to {LARGEST_DENSE} steps",
            )
        if not is_whole(self.parameters):
            raise ConfigurationError(
                f"parameters is {self.parameters!r}", "give how many the model has"
            )
        if self.bands == "auto" and self.kind == "blt":
            raise ConfigurationError(
                "the buffers of a strategy are not searched", "give --bands 4 or so"
            )
        if self.bands == "auto" and (self.sample_rate is None or self.epsilon is None):
            raise ConfigurationError(
                "bands = auto weighs more noise against less of it left at the end",
                "give --epsilon and --sample-rate, or a number of bands",
            )
        if self.epsilon is not None and self.sample_rate is None and self.kind != "blt":
            raise ConfigurationError(
                "what noise an epsilon needs depends on the sampling",
                "give --sample-rate: expected batch size over number of examples",
            )


@dataclass(frozen=True)
class DesignReport:
    """A strategy with its figures.

    Attributes:
        question: what was asked.
        design: what was designed, with its bands.
        strategy: the matrix.
        error: root of ``tr(W X^-1) / tr(W)``: noise of the run, by that of independent
            noise of the same multiplier.
        sigma: noise multiplier; None if neither it nor epsilon was given.
        plain_sigma: what independent noise needs for the same epsilon.
        epsilon: of the whole run; None without sampling or sigma.
        seconds: that it took to find.
        cached: whether it was found before.
    """

    question: DesignQuestion
    design: Design
    strategy: Strategy
    error: float
    sigma: float | None
    plain_sigma: float | None
    epsilon: float | None
    seconds: float
    cached: bool

    @property
    def error_at_epsilon(self) -> float | None:
        """The same ratio where both spend the same epsilon."""
        if self.sigma is None or self.plain_sigma is None:
            return None
        return self.error * self.sigma / self.plain_sigma

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        own, question = self.strategy, self.question
        sampled = own.bands is not None
        document: dict[str, Any] = {
            **self.design.to_json(),
            "error_by_independent_noise": self.error,
            "error_by_independent_noise_at_this_epsilon": self.error_at_epsilon,
            "sigma": self.sigma,
            "sigma_of_independent_noise": self.plain_sigma,
            "epsilon": self.epsilon,
            "delta": question.delta,
            "relation": question.relation.value,
            "sampling": "cyclic-poisson" if sampled else "fixed order",
            "sample_rate": question.sample_rate,
            "largest_column_norm": float(own.column_norms().max()),
            "largest_step_noise": float(own.inverse_row_norms().max()),
            "vectors_remembered": own.memory,
            "bytes_remembered": 4 * own.memory * question.parameters,
            "seconds": round(self.seconds, 3),
            "cached": self.cached,
        }
        if not sampled:
            document["sensitivity"] = own.sensitivity(_participation(question))
        elif question.sample_rate is not None:
            document["groups"] = own.bands
            document["group_rate"] = _rate(question, self.design.bands)
            document["draws_of_an_example"] = math.ceil(
                question.steps / self.design.bands
            )
        return document


def design_noise(question: DesignQuestion) -> DesignReport:
    """Design, or read from the cache, and account."""
    started = time.monotonic()
    bands = question.bands
    if isinstance(bands, str):
        bands = _best(question)
    design = Design.of(question.kind, question.steps, bands, question.workload)
    cached = design.path(designs_folder()).exists()
    strategy = design.strategy()
    seconds = time.monotonic() - started
    error, plain = (
        error_of(own, question.workload)
        for own in (strategy, Design.of(
            "toeplitz", question.steps, 1, question.workload).find())
    )  # fmt: skip
    sigma, plain_sigma = question.sigma, None
    if question.epsilon is not None:
        sigma = _sigma(question, strategy, question.epsilon)
        if question.sample_rate is not None:
            plain_sigma = _calibrated(
                question, question.epsilon, question.sample_rate, question.steps
            )
    epsilon = None
    if sigma is not None and (question.sample_rate is not None or not strategy.bands):
        event = _event(question, strategy, sigma)
        accountant = get_accountant("pld")
        epsilon = accountant.epsilon(event, question.relation, question.delta)
    return DesignReport(
        question, design, strategy, math.sqrt(error / plain), sigma, plain_sigma,
        epsilon, seconds, cached,
    )  # fmt: skip


def _participation(question: DesignQuestion) -> Participation:
    if question.separation is None:
        return Participation(most=1)
    return Participation(question.separation)


def _rate(question: DesignQuestion, bands: int) -> float:
    assert question.sample_rate is not None
    sampling = SamplingPlan.by_rate(question.sample_rate, question.steps, 1.0)
    return group_rate(sampling, bands)


def _best(question: DesignQuestion) -> int:
    assert question.sample_rate is not None and question.epsilon is not None
    epsilon = question.epsilon
    sampling = SamplingPlan.by_rate(question.sample_rate, question.steps, 1.0)

    def sigma(rate: float, draws: int) -> float:
        return _calibrated(question, epsilon, rate, draws)

    own = Correlation(strategy=question.kind)
    return best_bands(own, sampling, sigma, workload=question.workload)


def _calibrated(
    question: DesignQuestion, epsilon: float, rate: float, draws: int
) -> float:
    return calibrate_sigma(
        epsilon, question.delta, sample_rate=rate, steps=draws,
        relation=question.relation,
    )  # fmt: skip


def _sigma(question: DesignQuestion, strategy: Strategy, epsilon: float) -> float:
    if strategy.bands is None:  # one Gaussian of the whole pattern's sensitivity
        sensitivity = strategy.sensitivity(_participation(question))
        return sensitivity * _calibrated(question, epsilon, 1.0, 1)
    draws = math.ceil(question.steps / strategy.bands)
    return _calibrated(question, epsilon, _rate(question, strategy.bands), draws)


def _event(question: DesignQuestion, strategy: Strategy, sigma: float) -> Event:
    if strategy.bands is None:
        return GaussianEvent(sigma / strategy.sensitivity(_participation(question)))
    draws = math.ceil(question.steps / strategy.bands)
    return repeated(PoissonGaussianEvent(sigma, _rate(question, strategy.bands)), draws)


def plot_design(report: DesignReport, path: Path) -> Path:
    """Noise in every step and in the sum of steps so far, beside independent noise.

    Raises:
        ConfigurationError: matplotlib is not installed.
        StorageError: the picture cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    steps = np.arange(1, report.question.steps + 1)
    sigma = report.sigma or 1.0
    plain = report.plain_sigma or sigma
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, sigma * report.strategy.inverse_row_norms(), color=_OWN)
    left.plot(steps, np.full(len(steps), plain), color=_PLAIN)
    left.set_title("noise of a step", color=_INK)
    right.plot(steps, sigma * _summed(report.strategy), color=_OWN, label="correlated")
    right.plot(steps, plain * np.sqrt(steps), color=_PLAIN, label="independent")
    right.set_title("noise in the sum of all steps so far", color=_INK)
    right.legend(frameon=False)
    at = "at the same sigma"
    if report.plain_sigma is not None and report.epsilon is not None:
        at = f"at epsilon {report.epsilon:.3g}"
    figure.suptitle(
        f"{report.design.kind}, {report.design.bands} bands, "
        f"{report.question.steps} steps, {at}",
        color=_INK,
    )
    for axes in (left, right):
        axes.set_xlabel("step", color=_INK)
        axes.set_ylabel("standard deviation / clip bound", color=_INK)
        axes.set_ylim(bottom=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    # by name: what is written beside its place has another ending
    write_atomically(path, lambda p: figure.savefig(p, dpi=150, format="png"))
    return path


def _summed(strategy: Strategy) -> Floats:
    """Standard deviation of the sum of the first steps' noise, for each of them."""
    total = np.zeros(strategy.steps)
    sums, memory = np.empty(strategy.steps), ()
    for step in range(strategy.steps):
        unit = np.zeros(strategy.steps)
        unit[step] = 1.0
        row, memory = strategy.next(unit, memory, step)
        total += row
        sums[step] = np.linalg.norm(total)
    return sums
