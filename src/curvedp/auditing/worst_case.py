r"""A problem on which an attack is as strong as the guarantee allows.

A bias-free linear layer with two outputs, and canaries whose input is one large
coordinate each. The gradient of canary i is ``(p - y) x_i^T``: it lies in column i,
clipping cuts it to length C exactly, its direction is ``(1, -1)`` whatever the
parameters are, and no canary's gradient or score depends on another one. So one run
with m canaries *is* m independent runs of the worst pair of neighbours, which makes the
audit of a whole run a matter of seconds. (A map that mixes the columns, as whitening
from few probes does, lets them overlap a little: that costs the attacker power.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.auditing.audit import audit
from curvedp.auditing.canaries import Canaries
from curvedp.auditing.result import AuditResult
from curvedp.probes import PublicProbe
from curvedp.recipes import RECIPES, get_recipe

__all__ = ["HardestCase", "audit_all", "audit_worst_case"]

#: Size of a canary's input: its gradient is far above C at all times.
SIZE = 1e3
#: The parameters move this much less than the recipe says, so that no canary is learnt
#: by heart and loses its gradient.
SLOWER = 1e-3

#: What :func:`audit_all` audits.
CLAIM = {"epsilon": 4.0, "delta": 1e-5, "sample_rate": 0.3, "steps": 10}


@dataclass(frozen=True)
class HardestCase:
    """Model, data and canaries.

    Attributes:
        canaries: m, and the number of inputs.
        replaced: a canary that is left out stands there with the other label.
    """

    canaries: int
    replaced: bool = False

    def model(self) -> nn.Module:
        """Two outputs from m inputs, all zero at the start."""
        layer = nn.Linear(self.canaries, 2, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def dataset(self) -> TensorDataset:
        """Another example, without which a run has nothing to train on: zero."""
        return TensorDataset(torch.zeros(1, self.canaries), torch.zeros(1).long())

    def items(self) -> Canaries:
        """The canaries, and what stands in their place."""
        rows = SIZE * torch.eye(self.canaries)
        zero, one = torch.tensor(0), torch.tensor(1)
        other = [(x, one) for x in rows] if self.replaced else None
        return Canaries([(x, zero) for x in rows], other)

    def public(self, count: int = 64) -> PublicProbe:
        """Examples for recipes that want public ones."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(count, self.canaries, generator=generator)
        return PublicProbe(TensorDataset(x, torch.arange(count) % 2))


def audit_worst_case(
    recipe: str = "dp-sgd",
    *,
    canaries: int = 250,
    runs: int = 24,
    replaced: bool = False,
    method: str = "parallel",
    **settings: Any,
) -> AuditResult:
    """Audit a recipe on the worst case.

    Args:
        recipe: its name.
        canaries: m, of each run.
        runs: how many; scores of all of them count.
        replaced: attack by replacement, whatever relation is claimed.
        method: "parallel", or "one-run".
        **settings: as for :func:`curvedp.auditing.audit`; by default those of
            :data:`CLAIM`.
    """
    case = HardestCase(canaries, replaced)
    own = get_recipe(recipe)
    settings = {**CLAIM, "learning_rate": SLOWER * own.learning_rate, **settings}
    if own.correlation is not None:
        settings.setdefault("bands", 2)
    if "noise_multiplier" in settings:
        settings.pop("epsilon")
    settings.setdefault("expected_batch_size", settings["sample_rate"] * canaries / 2)
    # room for nearly every draw, so that a step is one pass
    options: dict[str, Any] = {"physical_batch_size": canaries}
    if own.pretrains:
        options["probes"] = case.public()
        # one that is learnt before the first step has no gradient left
        settings.setdefault("pretrain_learning_rate", SLOWER * SLOWER)
    return audit(
        case.model(),
        "cross-entropy",
        case.dataset(),
        recipe,
        method=method,
        canaries=case.items(),
        runs=runs,
        options=options,
        **settings,
    )


def audit_all(
    recipes: Sequence[str] | None = None,
    *,
    on_result: Callable[[AuditResult], None] | None = None,
    **settings: Any,
) -> list[AuditResult]:
    """Audit every private recipe on the worst case; a row for each.

    Args:
        recipes: names; by default all of :data:`curvedp.RECIPES` that are private.
        on_result: called after each.
        **settings: as for :func:`audit_worst_case`.
    """
    names = recipes or [name for name, recipe in RECIPES.items() if recipe.private]
    found = []
    for name in names:
        found.append(audit_worst_case(name, **settings))
        if on_result is not None:
            on_result(found[-1])
    return found
