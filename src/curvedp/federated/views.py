r"""Accounting by who sees what: the same noise is worth different epsilons.

Client i of n sends ``u_i = (S_i + N(0, (C s)^2 / n)) / n_i``: the sum of its clipped
gradients, its *share* of the noise, divided by its *declared* size. The server takes
the mean. A record of client j moves ``u_j`` by ``kappa C / n_j`` and the mean by
``kappa C w_j``, ``w_j = 1 / (n n_j)``; kappa is 2 if a record is replaced and 1 if it
is added, removed or zeroed. What that is worth depends on the noise around it:

===================  ===================================  ============================
view                 noise that hides a record            distance mu of one round
===================  ===================================  ============================
each-client          the client's own share               ``kappa sqrt(n) / s``
secure-aggregate,    all shares in the mean but those     ``kappa sqrt(n) / s w_max``
trusted-aggregate    of colluders and drop-outs           ``/ sqrt(sum_H w_i^2)``
===================  ===================================  ============================

H are the clients whose shares the observer neither knows nor misses: in the worst case
the owner of the record, whose weight is the largest, and those with the smallest
weights. With equal sizes ``mu = kappa sqrt(n / (n - c)) / s``.

A share that is missing is made up for by a trusted aggregator, and by nobody in a
secure aggregate: there a round with more drop-outs than declared is refused.

Clients are drawn by the server. Where it is the adversary the draw counts for nothing:
it knows who takes part, and could draw the same client in every round. There each round
costs the plain Gaussian price, and a plan is for all of them. The draw counts where the
aggregator is trusted to make it honestly. It amplifies if the client is the unit. A
record whose client is drawn is in a round or not, visibly (with its client go all the
client's other records): it costs what the rounds it was in cost, and no less. Records
that a client draws itself, in secret, amplify in every view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from curvedp.accounting import (
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    SeenGaussianEvent,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError
from curvedp.values import is_number, is_whole

__all__ = ["Federation", "Observer", "Unit", "View"]

_E = TypeVar("_E", bound=Enum)


class Observer(Enum):
    """Who the guarantee is against, by what they see of a round."""

    EACH_CLIENT = "each-client"
    SECURE_AGGREGATE = "secure-aggregate"
    TRUSTED_AGGREGATE = "trusted-aggregate"

    @property
    def sees(self) -> str:
        """In words, for statements."""
        return {
            Observer.EACH_CLIENT: "the server, who sees every client's update",
            Observer.SECURE_AGGREGATE: (
                "the server, who sees the sum of the updates alone (secure aggregation)"
            ),
            Observer.TRUSTED_AGGREGATE: (
                "whoever sees the models; the server is trusted with every update"
            ),
        }[self]


class Unit(Enum):
    """What one epsilon protects."""

    RECORD = "record"
    CLIENT = "client"

    @classmethod
    def parse(cls, value: Unit | str) -> Unit:
        """Read a unit from its printed name."""
        return _member(cls, value, "unit")


@dataclass(frozen=True)
class View:
    """Who sees what. Part of every guarantee of a federation.

    Attributes:
        observer: what the adversary sees.
        colluding: c, clients that tell the adversary their own noise. A participant
            knows its own: against the clients themselves, at least 1.
        dropouts: clients whose shares may be missing from a secure aggregate. A round
            that misses more is refused.
    """

    observer: Observer = Observer.EACH_CLIENT
    colluding: int = 0
    dropouts: int = 0

    def __post_init__(self) -> None:
        # text would pass for none of them where they are compared
        object.__setattr__(self, "observer", _member(Observer, self.observer, "view"))
        for name in ("colluding", "dropouts"):
            if not is_whole(getattr(self, name)):
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}", "give a number of clients"
                )

    @classmethod
    def of(cls, view: View | str, *, colluding: int = 0, dropouts: int = 0) -> View:
        """A view by the name of its observer; a view passes through."""
        if isinstance(view, View):
            return view
        return cls(_member(Observer, view, "view"), colluding, dropouts)

    @property
    def is_secure(self) -> bool:
        """Whether the guarantee rests on secure aggregation."""
        return self.observer is Observer.SECURE_AGGREGATE

    def text(self) -> str:
        """For people: it stands beside every epsilon."""
        words = self.observer.sees
        if self.observer is Observer.EACH_CLIENT:
            return words
        if self.colluding:
            words += f", and {self.colluding} client(s) with it"
        else:
            words += "; not against a participant, who knows its own noise"
        if self.dropouts and self.observer is Observer.SECURE_AGGREGATE:
            words += f"; up to {self.dropouts} drop-outs a round are covered"
        return words

    def facts(self) -> dict[str, Any]:
        """As JSON values, for the ledger."""
        return {
            "view": self.observer.value,
            "colluding": self.colluding,
            "dropouts": self.dropouts,
        }


@dataclass(frozen=True)
class Federation:
    """What is declared about the clients. Public, all of it; nothing is measured.

    Attributes:
        sizes: declared number of records of every client, the divisor of its update.
            Under add-remove the true one is private; near it is good enough.
        rounds: T.
        unit: what one epsilon protects: a record, or a client with all its records.
        relation: when two datasets count as neighbours.
        client_rate: probability that a client is drawn for a round. It spares messages;
            privacy by it there is with a trusted aggregator alone.
        record_rate: probability that a client draws a record, in secret.
    """

    sizes: tuple[float, ...]
    rounds: int
    unit: Unit = Unit.RECORD
    relation: Relation = Relation.ADD_REMOVE
    client_rate: float = 1.0
    record_rate: float = 1.0

    def __post_init__(self) -> None:
        # text would pass for none of them where they are compared
        object.__setattr__(self, "unit", Unit.parse(self.unit))
        object.__setattr__(self, "relation", Relation.parse(self.relation))
        if not self.sizes or not all(is_number(n) and n > 0 for n in self.sizes):
            raise ConfigurationError(
                f"declared sizes are {self.sizes!r}",
                "declare a positive number of records for every client",
            )
        if not is_whole(self.rounds, 1):
            raise ConfigurationError(
                f"rounds is {self.rounds!r}", "give a whole number from 1 on"
            )
        for name in ("client_rate", "record_rate"):
            rate = getattr(self, name)
            if not (is_number(rate) and 0 < rate <= 1):
                raise ConfigurationError(
                    f"{name} is {rate!r}", "give a number above 0 and at most 1"
                )
        if self.unit is Unit.CLIENT and self.record_rate < 1:
            raise ConfigurationError(
                "with the client as the unit, drawing its records amplifies nothing",
                "leave record_rate at 1",
            )

    @property
    def clients(self) -> int:
        """Their number n."""
        return len(self.sizes)

    @property
    def weights(self) -> tuple[float, ...]:
        """``w_i``: by how much a clipped unit of client i moves the mean, over C."""
        n = self.clients
        if self.unit is Unit.CLIENT:
            return (1.0 / n,) * n
        return tuple(1.0 / (n * size * self.record_rate) for size in self.sizes)

    def seen_noise(self, view: View, noise_multiplier: float) -> float:
        """``s_eff``: noise over what a unit moves, for this observer, in one round.

        ``mu = kappa / s_eff``. Every client's own share is ``s / sqrt(n)``.
        """
        self.check(view)
        share = noise_multiplier / math.sqrt(self.clients)
        if view.observer is Observer.EACH_CLIENT:
            return share
        lost = view.colluding
        if view.observer is Observer.SECURE_AGGREGATE:
            lost += view.dropouts
        largest, *others = sorted(self.weights, reverse=True)
        hiding = [largest, *others[lost:]]  # the worst: larger weights are lost first
        return share * math.hypot(*hiding) / largest

    def round_event(self, view: View, noise_multiplier: float) -> Event:
        """What one round costs, as an event for the ledger."""
        noise = self.seen_noise(view, noise_multiplier)
        if self.record_rate < 1:
            # that clients are drawn too is not counted: no less private for it
            return PoissonGaussianEvent(noise, self.record_rate)
        if not self.counts_the_draw(view):
            return GaussianEvent(noise)
        if self.unit is Unit.CLIENT:
            return PoissonGaussianEvent(noise, self.client_rate)
        return SeenGaussianEvent(noise, self.client_rate)

    def counts_the_draw(self, view: View) -> bool:
        """Whether the price of a round rests on an honest draw of clients.

        Never against the server, who makes the draw and knows it.
        """
        trusted = view.observer is Observer.TRUSTED_AGGREGATE
        return trusted and self.client_rate < 1 and self.record_rate == 1

    def check(self, view: View) -> None:
        """Refuse a view under which nothing would be hidden, or the unit cannot be."""
        if view.observer is Observer.EACH_CLIENT:
            if view.dropouts or view.colluding:
                raise ConfigurationError(
                    "in the view each-client no record relies on the noise of others",
                    "leave colluding and dropouts out",
                )
        elif view.colluding + view.dropouts >= self.clients:
            raise ConfigurationError(
                f"{view.colluding} colluding clients and {view.dropouts} drop-outs "
                f"leave no noise of {self.clients} clients",
                "lower them, or take the view each-client",
            )
        trusted = view.observer is Observer.TRUSTED_AGGREGATE
        hides_clients = self.relation is not Relation.ADD_REMOVE
        if self.unit is Unit.CLIENT and not trusted and not hides_clients:
            raise ConfigurationError(
                "the server knows which clients there are, and add-remove of a client "
                "would hide that",
                "take the relation zero-out: the client's data are hidden, not that it "
                "takes part",
            )

    def facts(self) -> dict[str, Any]:
        """As JSON values, for the ledger."""
        return {
            "declared_sizes": list(self.sizes),
            "clients": self.clients,
            "client_rate": self.client_rate,
            "record_rate": self.record_rate,
        }


def _member(kind: type[_E], value: _E | str, what: str) -> _E:
    """One of a kind by itself or by its name."""
    for member in kind:
        if value is member or value == member.value:
            return member
    names = ", ".join(str(member.value) for member in kind)
    raise ConfigurationError(f"unknown {what} {value!r}", f"choose one of: {names}")
