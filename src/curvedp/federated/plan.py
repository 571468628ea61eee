"""The plan of a federation: clients, view, clip bound, noise and budget in one value.

As :class:`curvedp.plan.Plan` does for one dataset, it is made whole, before any data is
touched. Server and clients build the same plan from the same declared facts, and each
compares its digest with the other's.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from curvedp.accounting import (
    Event,
    PoissonGaussianEvent,
    calibrate_sigma,
    get_accountant,
    repeated,
)
from curvedp.accounting._validate import check_epsilon
from curvedp.accounting.calibrate import solve_sigma
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError
from curvedp.federated.views import Federation, Observer, Unit, View

__all__ = ["FederatedPlan"]


@dataclass(frozen=True)
class FederatedPlan:
    """Everything that the guarantee of a federation depends on.

    Attributes:
        federation: declared facts about clients and rounds.
        view: who the guarantee is against.
        bound: C, of what a unit contributes to its client's sum.
        noise_multiplier: s. A client adds noise of ``C s / sqrt(n)`` to its sum.
        delta: of (epsilon, delta).
        target_epsilon: what s was calibrated for; None if s was given.
    """

    federation: Federation
    view: View
    bound: float
    noise_multiplier: float
    delta: float
    target_epsilon: float | None = None

    @classmethod
    def make(
        cls,
        federation: Federation,
        view: View | str,
        *,
        bound: float,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
    ) -> FederatedPlan:
        """Check the settings against each other and calibrate the noise.

        Args:
            federation: declared facts.
            view: who sees what; there is no epsilon without it.
            bound: clip bound C.
            delta: refused at or above one over the number of units.
            epsilon: target for that view; or
            noise_multiplier: given, and epsilon follows.
        """
        chosen = View.of(view)
        federation.check(chosen)
        units = (
            federation.clients
            if federation.unit is Unit.CLIENT
            else sum(federation.sizes)
        )
        if not 0 < delta < 1 / units:
            raise ConfigurationError(
                f"delta {delta!r} is not below 1/{units:.0f}, one over the number of "
                f"{federation.unit.value}s",
                "choose a smaller one",
            )
        if (epsilon is None) == (noise_multiplier is None):
            raise ConfigurationError(
                "give either epsilon (the noise is calibrated to it) or "
                "noise_multiplier (epsilon follows from it)",
                "epsilon=1.0 is a strong guarantee, 8.0 a weak one",
            )
        if epsilon is not None:
            check_epsilon(epsilon)
            noise_multiplier = _calibrated(federation, chosen, epsilon, delta)
        assert noise_multiplier is not None
        return cls(federation, chosen, bound, noise_multiplier, delta, epsilon)

    @property
    def share_multiplier(self) -> float:
        """``s / sqrt(n)``: noise of a client's share over C."""
        return self.noise_multiplier / math.sqrt(self.federation.clients)

    @property
    def divisors(self) -> tuple[float, ...]:
        """What every client divides its noisy sum by: its declared expected size."""
        facts = self.federation
        if facts.unit is Unit.CLIENT:
            return (1.0,) * facts.clients
        return tuple(size * facts.record_rate for size in facts.sizes)

    def round_event(self) -> Event:
        """What a round costs in this plan's view."""
        return self.federation.round_event(self.view, self.noise_multiplier)

    @property
    def accountant(self) -> str:
        """The exact formula where there is one, otherwise PLD."""
        sampled = isinstance(self.round_event(), PoissonGaussianEvent)
        return "pld" if sampled else "gaussian"

    def epsilon(
        self, rounds: int | None = None, view: View | str | None = None
    ) -> float:
        """Epsilon of a number of rounds, for this plan's observer or for another."""
        seen = self.view if view is None else View.of(view)
        count = self.federation.rounds if rounds is None else rounds
        return _epsilon(self.federation, seen, self.noise_multiplier, self.delta, count)

    def statement(self, rounds: int | None = None) -> list[tuple[str, str]]:
        """Epsilon with all that it means, as lines of names and values."""
        facts = self.federation
        lines = [
            ("epsilon", f"{_shown(self.epsilon(rounds))} at delta {self.delta:g}"),
            ("against", self.view.text()),
            ("unit", f"one {facts.unit.value}, relation {facts.relation.value}"),
            ("rounds", f"{facts.rounds if rounds is None else rounds}"),
            ("clients", f"{facts.clients}, {self._drawn()}"),
            (
                "noise",
                f"s = {self.noise_multiplier:g}, a share of "
                f"{self.share_multiplier:.4g} C each; {self.accountant}",
            ),
        ]
        if self.view.observer is not Observer.EACH_CLIENT and not self._hidden():
            own = self.epsilon(rounds, View())
            lines.append(
                ("if the server looks", f"epsilon {_shown(own)} (each-client)")
            )
        apart = "settings chosen by looking at results; side channels such as timing"
        if not self.view.is_secure:  # whose noise is whole numbers, drawn exactly
            apart += "; the rounding of floating-point noise"
        return [*lines, ("not covered", apart)]

    def _hidden(self) -> bool:
        """Whether the view each-client has no meaning for this unit and relation."""
        facts = self.federation
        return facts.unit is Unit.CLIENT and facts.relation is Relation.ADD_REMOVE

    def _drawn(self) -> str:
        facts = self.federation
        words = "all in every round"
        if facts.client_rate < 1:
            words = f"each drawn with probability {facts.client_rate:g}"
        if facts.record_rate < 1:
            words += f", records with probability {facts.record_rate:g}"
        return words

    def facts(self) -> dict[str, Any]:
        """As JSON values; server and clients must agree on all of them."""
        return {
            **self.federation.facts(),
            **self.view.facts(),
            "bound": self.bound,
            "noise_multiplier": self.noise_multiplier,
        }

    def promises(self) -> dict[str, Any]:
        """The facts and what is promised, for the digest and the ledger's header."""
        return {
            "unit": self.federation.unit.value,
            "relation": self.federation.relation.value,
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "planned_steps": self.federation.rounds,
            "accountant": self.accountant,
            **self.facts(),
        }

    def digest(self) -> str:
        """A checksum of the plan, for server and clients to compare."""
        text = json.dumps(self.promises(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _epsilon(
    federation: Federation, view: View, noise: float, delta: float, rounds: int
) -> float:
    if rounds == 0:
        return 0.0
    event = federation.round_event(view, noise)
    name = "pld" if isinstance(event, PoissonGaussianEvent) else "gaussian"
    accountant = get_accountant(name)
    return accountant.epsilon(repeated(event, rounds), federation.relation, delta)


def _calibrated(
    federation: Federation, view: View, epsilon: float, delta: float
) -> float:
    """Smallest s, rounded up, that keeps the view's epsilon at or below the target."""
    event = federation.round_event(view, 1.0)
    near = None
    if isinstance(event, PoissonGaussianEvent):
        # the search on PLD is long and cached; s is proportional to what is seen
        seen = calibrate_sigma(
            epsilon,
            delta,
            sample_rate=event.sample_rate,
            steps=federation.rounds,
            relation=federation.relation,
        )
        near = seen / event.noise_multiplier
        rounded = math.ceil(near * 1e4) / 1e4
        if _epsilon(federation, view, rounded, delta, federation.rounds) <= epsilon:
            return rounded
    return solve_sigma(
        lambda s: _epsilon(federation, view, s, delta, federation.rounds),
        epsilon,
        delta,
        1.0,
        federation.rounds,
        near=near,
    )


def _shown(epsilon: float) -> str:
    return "infinity" if math.isinf(epsilon) else f"{epsilon:.4g}"
