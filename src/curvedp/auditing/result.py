"""What an audit found, for people, for programs and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from curvedp.auditing.bounds import Claim
from curvedp.auditing.evidence import Evidence
from curvedp.auditing.one_run import Guesses

__all__ = ["AuditResult"]


@dataclass(frozen=True)
class AuditResult:
    """A claim and the lower bound that an attack has proved.

    Attributes:
        recipe: name of the method.
        method: "one-run", "runs" or "parallel".
        score: "white-box" (every release is seen) or "black-box" (the final losses).
        claim: what is promised.
        epsilon_lower: epsilon is at least this, with ``confidence``.
        confidence: of the bound.
        runs: training runs that were made.
        canaries: canaries in each of them.
        found: counts behind the bound.
        seconds: that the audit took.
        steps: of a run. With groups that take turns an example is in fewer draws
            (``claim.steps``).
    """

    recipe: str
    method: str
    score: str
    claim: Claim
    epsilon_lower: float
    confidence: float
    runs: int
    canaries: int
    found: Evidence | Guesses
    seconds: float
    steps: int

    @property
    def holds(self) -> bool:
        """Whether the bound is within the claim. It never proves that the claim is."""
        return self.epsilon_lower <= self.claim.epsilon

    @property
    def share(self) -> float:
        """The bound as a share of the claim: how tight the audit is."""
        return self.epsilon_lower / self.claim.epsilon

    def lines(self) -> list[tuple[str, str]]:
        """The result as names and values."""
        claim = self.claim
        bound = (
            f"epsilon is at least {self.epsilon_lower:.4g} with "
            f"{100 * self.confidence:g} % confidence"
        )
        return [
            ("verdict", self._verdict()),
            ("claim", f"({claim.epsilon:.4g}, {claim.delta:g})-DP, {self._relation()}"),
            ("bound", f"{bound} ({100 * self.share:.0f} % of the claim)"),
            ("attack", f"{self._attack()}, {self.score}; {self._counts()}"),
            ("supposes", self._supposes()),
            (
                "mechanism",
                f"{self.recipe}, {self._steps()}, sampling rate "
                f"{claim.sample_rate:.4g}, noise multiplier "
                f"{claim.noise_multiplier:.4g}",
            ),
        ]

    def _steps(self) -> str:
        if self.steps == self.claim.steps:
            return f"{self.steps} steps"
        return f"{self.steps} steps, an example in {self.claim.steps} draws"

    def _supposes(self) -> str:
        """What the bound takes for granted."""
        found, taken = self.found, []
        if isinstance(found, Evidence) and found.best is found.fitted:
            free = found.clopper_pearson.epsilon
            taken.append(
                "the claimed sampling and steps, with noise of any strength (without "
                f"that: at least {free:.4g})"
            )
        if self.method == "parallel":
            taken.append("scores of canaries that do not depend on each other")
        return "; ".join(taken) or "nothing"

    def _verdict(self) -> str:
        if self.holds:
            return "the attack stays below the claim"
        return "BROKEN: the attack proves more than is claimed"

    def _relation(self) -> str:
        return f"relation {self.claim.relation.value}"

    def _attack(self) -> str:
        if self.method == "one-run":
            return f"one run with {self.canaries} canaries"
        if self.method == "runs":
            return f"{self.runs} runs with and without a canary"
        return f"{self.runs} runs with {self.canaries} separate canaries each"

    def _counts(self) -> str:
        if isinstance(self.found, Guesses):
            return f"{self.found.right} of {self.found.made} guesses were right"
        rates = self.found.best.rates
        return (
            f"{rates.hits} of {rates.with_canary} found, {rates.alarms} of "
            f"{rates.without} false alarms"
        )

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines())
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.lines())

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        claim, found = self.claim, self.found
        document: dict[str, Any] = {
            "recipe": self.recipe,
            "method": self.method,
            "score": self.score,
            "holds": self.holds,
            "epsilon_claimed": claim.epsilon,
            "epsilon_lower": self.epsilon_lower,
            "share_of_claim": self.share,
            "confidence": self.confidence,
            "delta": claim.delta,
            "relation": claim.relation.value,
            "noise_multiplier": claim.noise_multiplier,
            "sample_rate": claim.sample_rate,
            "steps": self.steps,
            "draws": claim.steps,
            "supposes": self._supposes(),
            "runs": self.runs,
            "canaries": self.canaries,
            "seconds": round(self.seconds, 2),
        }
        if isinstance(found, Guesses):
            document["guesses"] = {"made": found.made, "right": found.right}
        else:
            for name in ("clopper_pearson", "fitted"):
                proof = getattr(found, name)
                document[name] = {"epsilon_lower": proof.epsilon, **asdict(proof.rates)}
        return document

    def plot(self, path: str | Path) -> Path:
        """Draw the claim and the bound; see :func:`curvedp.auditing.plot_audits`."""
        from curvedp.auditing.plots import plot_audits

        return plot_audits([self], Path(path))
