"""Sums that nobody sees the terms of: the grid they are on, and what they say.

The protocol is Flower's SecAgg+ (:mod:`curvedp.federated.secagg`); here is what it
computes with, free of it. Every client sends ``v_i = a_i (S_i + noise)`` on one grid,
``a_i = n_min / n_i``, so that the sum over ``n_min`` is the sum of the updates.

How fine the grid is follows from the plan alone. The protocol adds modulo 2^32, and n
values must fit: ``2^k <= (2^32 - 1) / n`` levels over the range ``[-R, R]``. R holds a
coordinate of the largest sum, ``n_min C`` as declared, and twelve standard deviations
of noise. A coordinate beyond is clamped *before* the noise (:mod:`.noise.lattice`);
noise beyond has a chance of 4e-33 a coordinate, and a plan in which that would matter
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.federated.messages import Update
from curvedp.federated.plan import FederatedPlan
from curvedp.noise.lattice import LatticeShare

__all__ = ["MODULUS", "SumGrid", "Total"]

#: What masked values are added modulo.
MODULUS = 2**32

#: Noise is held within so many standard deviations, with a chance beyond of:
_TAILS, _BEYOND = 12.0, 3.6e-33


@dataclass(frozen=True)
class Total:
    """What comes of a round under masks.

    Attributes:
        senders: what each client in the sum says beside it, without values.
        values: the sum of the shares; None if it is lost.
        reason: why it is lost.
    """

    senders: tuple[Update, ...] = ()
    values: Mapping[str, Tensor] | None = None
    reason: str = ""


@dataclass(frozen=True)
class SumGrid:
    """The grid of a plan with secure aggregation. Public.

    Attributes:
        plan: whose noise and sizes it is for.
        coordinates: d.
        half_range: R, a power of two.
        levels: over the whole range, a power of two.
    """

    plan: FederatedPlan
    coordinates: int
    half_range: float
    levels: int

    @classmethod
    def of(cls, plan: FederatedPlan, coordinates: int) -> SumGrid:
        """The finest grid on which the sum of all shares fits.

        Raises:
            ConfigurationError: there are too few clients for the declared drop-outs and
                colluders, or noise beyond the range would count.
        """
        facts, view = plan.federation, plan.view
        clients = facts.clients
        if clients < 3 or clients <= 2 * view.dropouts + view.colluding:
            raise ConfigurationError(
                f"secure aggregation of {clients} clients cannot hide single updates "
                f"with {view.dropouts} drop-outs and {view.colluding} colluders",
                "it needs 3 clients, and more than twice the drop-outs plus the "
                "colluders: shares of both of a client's secrets would be with them",
            )
        if facts.client_rate < 1:
            raise ConfigurationError(
                "secure aggregation is for rounds that all clients are asked in",
                "leave client_rate at 1; clients may drop out as declared",
            )
        if _BEYOND * clients * facts.rounds * coordinates > 1e-9 * plan.delta:
            raise ConfigurationError(
                f"delta {plan.delta:g} is so small that noise beyond the range counts",
                "take a larger delta",
            )
        largest = min(plan.divisors) * plan.bound
        levels = 2 ** math.floor(math.log2((MODULUS - 1) / clients))
        half = 2.0 ** math.ceil(math.log2(largest))
        while True:
            grid = cls(plan, coordinates, half, levels)
            std = max(grid.share(i).noise_std for i in range(clients))
            if largest + _TAILS * std <= half:
                return grid
            half *= 2.0

    @property
    def spacing(self) -> float:
        """``h = 2 R / levels``."""
        return 2.0 * self.half_range / self.levels

    @property
    def threshold(self) -> int:
        """Clients that must be in a sum before any of them helps to unmask it."""
        return self.plan.federation.clients - self.plan.view.dropouts

    def share(self, client: int) -> LatticeShare:
        """The mechanism of a client."""
        plan = self.plan
        smallest = min(plan.divisors)
        return LatticeShare(
            plan.share_multiplier,
            plan.bound,
            smallest / plan.divisors[client],
            self.spacing,
            smallest * plan.bound,
            self.coordinates,
        )

    def could_be(self, total: Mapping[str, Tensor], shares: int) -> bool:
        """Whether so many shares can add up to this in every coordinate.

        A sum whose masks did not cancel is uniform modulo 2^32, of which the sums of
        ``n`` shares are a part: in some of many coordinates it shows.
        """
        most = shares * self.half_range * (1 + 1e-6)  # Flower's own rounding
        return all(bool((values.abs() <= most).all()) for values in total.values())

    def mean(
        self,
        total: Mapping[str, Tensor],
        senders: Collection[int],
        like: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], float]:
        """Mean of the updates of those in a sum, and the noise that it has."""
        divisor = min(self.plan.divisors) * len(senders)
        values = {
            name: (total[name].double() / divisor).to(p.device, p.dtype)
            for name, p in like.items()
        }
        std = math.hypot(*(self.share(i).noise_std for i in senders))
        return values, std / divisor

    def widening(self) -> float:
        """Noise of the shares over what a plan without a grid has; the largest."""
        plan = self.plan
        return max(
            self.share(i).noise_std
            / (self.share(i).scale * plan.share_multiplier * plan.bound)
            for i in range(plan.federation.clients)
        )
