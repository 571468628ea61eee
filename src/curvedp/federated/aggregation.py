"""The mean of a round's updates, with the noise that the plan's view relies on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from curvedp.barrier import Release
from curvedp.federated.plan import FederatedPlan
from curvedp.federated.views import Observer, Unit
from curvedp.noise import RandomStreams, mean_release, restore_release

__all__ = ["hides_participants", "is_trusted", "mean_of_updates", "share_std"]


def is_trusted(plan: FederatedPlan) -> bool:
    """Whether the server is trusted with every update."""
    return plan.view.observer is Observer.TRUSTED_AGGREGATE


def hides_participants(plan: FederatedPlan) -> bool:
    """Whether who was drawn is a secret that the guarantee rests on."""
    facts = plan.federation
    return is_trusted(plan) and facts.unit is Unit.CLIENT and facts.client_rate < 1


def share_std(plan: FederatedPlan, client: int) -> float:
    """Noise in a client's update, after its division."""
    return plan.share_multiplier * plan.bound / plan.divisors[client]


def mean_of_updates(
    plan: FederatedPlan,
    accepted: Mapping[int, Release],
    nothing: Callable[[], Release],
    streams: RandomStreams,
    at: tuple[int, int],
) -> Release:
    """Mean of the updates of some clients.

    A trusted server adds what noise is missing with the others. Where it hides who was
    drawn, it divides by the expected number of them.

    Args:
        plan: whose view says what noise there must be.
        accepted: what the clients sent, by their numbers.
        nothing: gives zeros, which are the mean of no updates.
        streams: noise of a trusted server comes from here.
        at: address of that noise, round and attempt.
    """
    facts = plan.federation
    divisor = float(len(accepted) or 1)
    if hides_participants(plan):
        divisor = facts.client_rate * facts.clients
    missing = [i for i in range(facts.clients) if i not in accepted]
    top_up = 0.0
    if is_trusted(plan) and missing:
        top_up = math.hypot(*(share_std(plan, i) for i in missing))
    # nobody was drawn: noise alone, and it counts
    releases = [accepted[i] for i in sorted(accepted)] or [nothing()]
    mean = mean_release(releases, divisor, top_up=top_up, streams=streams, at=at)
    if not hides_participants(plan):
        return mean
    # the same number whoever was drawn; as it was added up, its rounding would tell
    std = math.hypot(*(share_std(plan, i) for i in range(facts.clients))) / divisor
    return restore_release(mean.values, mean.frame, mean.step, noise_std=std)
