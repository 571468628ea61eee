"""A site with what serves it, and which sites belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from curvedp.layers.direct import ExpandedServer, RuleServer, VmapServer
from curvedp.layers.rewrite import RewrittenServer
from curvedp.layers.rules import Site

__all__ = ["Covered", "tied_groups"]


@dataclass(frozen=True)
class Covered:
    """A site together with what serves it."""

    site: Site
    server: RuleServer | ExpandedServer | VmapServer | RewrittenServer


def tied_groups(covered: Sequence[Covered]) -> list[list[Covered]]:
    """Sites that have a parameter in common, together; all others alone, in order.

    A tied parameter has one gradient, which is the sum over the modules that use it. It
    has to be clipped as a whole, so its sites make up one layer.
    """
    groups: list[list[Covered]] = []
    for item in covered:
        names = set(item.site.parameters.values())
        with_it = [g for g in groups if any(_has(other, names) for other in g)]
        if not with_it:
            groups.append([item])
            continue
        first, *others = with_it
        for group in others:
            first += group
            groups.remove(group)
        first.append(item)
    return groups


def _has(item: Covered, names: set[str]) -> bool:
    return not names.isdisjoint(item.site.parameters.values())
