"""What a client insists on before it answers a server: a file and a limit of its own.

The server describes the federation, and without terms a client takes part in whatever
it describes. With them it refuses, before any record is touched, a federation that
differs from its own file, or whose rounds together would cost more than its limit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from curvedp.errors import ConfigurationError, RoundError
from curvedp.experiments.federations import FederationConfig
from curvedp.federated import FederatedPlan, View
from curvedp.models.factory import is_factory
from curvedp.values import is_number

__all__ = ["ClientTerms"]

#: Of the server alone, or of a simulation: they change nothing that a client does.
_NOT_SHARED = ("data", "clients", "partition", "least_clients", "exact_frames")


@dataclass(frozen=True)
class ClientTerms:
    """A client's own word on what it takes part in.

    Attributes:
        config: the federation as this client knows it; None takes the server's word.
        max_epsilon: most that all planned rounds may cost. Against the server itself
            (view each-client), unless the client's own config names another view: a
            server could claim to be trusted.
        delta: of that limit; None takes the config's.
    """

    config: FederationConfig | None = None
    max_epsilon: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        if self.config is not None:
            self.config.declared()
        if self.max_epsilon is None:
            if self.delta is not None:
                raise ConfigurationError(
                    "delta belongs to a limit on epsilon", "give --max-epsilon as well"
                )
            return
        if not (is_number(self.max_epsilon) and self.max_epsilon > 0):
            raise ConfigurationError(
                f"max_epsilon is {self.max_epsilon!r}", "give a positive number"
            )
        if self._delta is None or not (is_number(self._delta) and 0 < self._delta < 1):
            raise ConfigurationError(
                f"a limit on epsilon is at a delta, and delta is {self._delta!r}",
                "give --delta below one over the number of records, or --config",
            )
        if self.config is not None:
            excess = self._excess(self.config.plan())
            if excess:
                raise ConfigurationError(excess, "raise the limit or lower the budget")

    @property
    def _delta(self) -> float | None:
        if self.delta is None and self.config is not None:
            return self.config.delta
        return self.delta

    def accept(self, asked: FederationConfig) -> FederationConfig:
        """The federation that this client takes part in: its own, or the server's.

        Raises:
            RoundError: it is not what the client's file says, or above its limit. The
                text is public: it depends on declared settings alone.
        """
        if self.config is not None:
            names = [f.name for f in fields(asked) if f.name not in _NOT_SHARED]
            other = [n for n in names if getattr(asked, n) != getattr(self.config, n)]
            if other:
                raise RoundError(
                    "the server's federation is not that of this client's own config: "
                    f"{', '.join(other)} differ",
                    "agree on one file",
                )
        chosen = self.config or asked
        if self.config is None and is_factory(asked.model):
            raise RoundError(
                f"the server names the model {asked.model!r}, and to import it is to "
                "run its code",
                "give this client the federation's file: --config FILE",
            )
        if self.max_epsilon is not None:
            excess = self._excess(chosen.plan())
            if excess:
                raise RoundError(excess, "plan fewer rounds or more noise")
        return chosen

    def _excess(self, plan: FederatedPlan) -> str:
        """What is too much about a plan; empty if nothing is."""
        assert self.max_epsilon is not None and self._delta is not None
        view = View() if self.config is None else plan.view
        at = replace(plan, delta=self._delta)
        try:
            cost = at.epsilon(view=view)
        except ConfigurationError as error:
            return f"this client's limit does not fit the plan: {error.problem}"
        if cost <= self.max_epsilon:
            return ""
        return (
            f"all rounds together cost epsilon {cost:.4g} at delta {self._delta:g} "
            f"(view {view.observer.value}), and this client's limit is "
            f"{self.max_epsilon:g}"
        )
