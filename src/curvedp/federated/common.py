"""What server and clients set up alike: recipe, loss, coverage, whitener, ledger."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvedp._version import __version__
from curvedp.accounting import Ledger, LedgerHeader, MemoryLedger
from curvedp.accounting.records import UNSAFE_NOTE
from curvedp.errors import ConfigurationError, RoundError
from curvedp.federated.messages import agreement
from curvedp.federated.plan import FederatedPlan
from curvedp.layers import Batch, Coverage, PerExampleLoss, cover, synthesiser_like
from curvedp.noise import RandomStreams
from curvedp.probes import LabelRule, Probe
from curvedp.recipes import Recipe, get_federated_recipe
from curvedp.train.coupling import CouplingCheck
from curvedp.train.ledgers import open_with
from curvedp.train.losses import per_example_loss
from curvedp.train.passes import ForwardPrecision
from curvedp.train.probing import choose_labels, choose_probe
from curvedp.train.whitened import CurvatureSource, FixedWhitener, WhitenerSource
from curvedp.whitening import IdentityWhitener, Whitener

__all__ = ["Shared", "checked_parameters", "open_federated_ledger", "usable_recipe"]


class Shared:
    """A model with its coverage and its whitener, the same on every machine.

    Args:
        model: with the same architecture and frozen values everywhere.
        loss: name, torch loss or per-example function.
        recipe: a federated one, or its name.
        plan: the federation's.
        template: a batch of zeros in the shapes of inputs and targets.
        probe_seed: of the synthetic probes; shared, public.
        probes: other probes than the recipe's synthetic ones; public.
        labels: label rule of the probes, where the loss does not say it.

    Clients that live in one process may share it: secrets are not in here.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | nn.Module | Callable[..., Any],
        recipe: Recipe | str,
        plan: FederatedPlan,
        template: Batch,
        *,
        probe_seed: int = 0,
        probes: Probe | None = None,
        labels: LabelRule | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.recipe = usable_recipe(recipe)
        self.rule = self.recipe.clipping_rule()
        if not math.isclose(self.rule.bound, plan.bound):
            raise ConfigurationError(
                f"the recipe clips to {self.rule.bound:g}, and the plan's bound is "
                f"{plan.bound:g}",
                "make the plan with bound=recipe.clip_norm",
            )
        self.loss: PerExampleLoss = per_example_loss(loss)
        self._synthesise = synthesiser_like(template, model)
        self.coverage: Coverage = cover(model, self._synthesise, self.loss)
        self._looked: dict[int, CouplingCheck] = {}
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in self.coverage.parameters}
        self.template = template
        self.probe_seed = probe_seed
        self.whiteners: WhitenerSource = FixedWhitener()
        self.refresh = 0
        curvature = self.recipe.curvature
        if curvature is not None:
            probe = choose_probe(curvature, probes, template, model, None)
            step_length = self.recipe.learning_rate * self.rule.bound
            self.refresh = curvature.refresh
            self.whiteners = CurvatureSource(
                model,
                self.coverage,
                self.loss,
                curvature.estimate(probe, choose_labels(curvature, labels, loss)),
                curvature.whitening(plan.federation.rounds, step_length),
                curvature.schedule(),
                RandomStreams(probe_seed),  # its public probe stream
            )
        self.agreement = agreement(plan, self.recipe, model, probe_seed)

    @property
    def coordinates(self) -> int:
        """d, of what is trained."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def clients_whiten(self) -> bool:
        """Whether gradients are reshaped before they are clipped.

        Otherwise a map, if there is one, acts on the noisy mean, and is the server's.
        """
        curvature = self.recipe.curvature
        return curvature is not None and curvature.read_out != "forward"

    def whitener_due(self, round_number: int) -> int:
        """The round whose parameters the whitener of a round is made of."""
        if not self.refresh:
            return 0
        return round_number - round_number % self.refresh

    def whitener_at(self, round_number: int, made_of: Mapping[str, Tensor]) -> Whitener:
        """The map in which gradients of a round are clipped.

        It is made again where the last one was of other parameters.

        Args:
            round_number: the model has the parameters of that round.
            made_of: parameters of the round that the map was due in, if an earlier one.
        """
        if not self.clients_whiten:
            return IdentityWhitener()
        if made_of:
            due, known = self.whitener_due(round_number), self.whiteners.state()
            kept = known.get("parameters", {})
            same = known.get("step") == due and all(
                torch.equal(kept[name].cpu(), value.cpu())
                for name, value in made_of.items()
            )
            if not same:
                self.whiteners.load({"step": due, "parameters": dict(made_of)})
        return self.whiteners.at(round_number)

    def require_uncoupled(self, rows: int) -> None:
        """Check once, in passes of this size and in the model's mode, for coupling."""
        if rows not in self._looked:
            self._looked[rows] = CouplingCheck(
                self.model,
                self.coverage,
                self._synthesise,
                self.loss,
                ForwardPrecision(None, self.model),
                rows,
            )
        self._looked[rows].require_mode()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put parameters into the model."""
        checked = checked_parameters(values, self.parameters, "the parameters")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(checked[name])

    def copies(self) -> dict[str, Tensor]:
        """The parameters as they are now, on the CPU."""
        return {n: p.detach().cpu().clone() for n, p in self.parameters.items()}


def usable_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe that clients and a server can follow, or it is refused by name."""
    chosen = get_federated_recipe(recipe)
    if not chosen.federated:
        raise ConfigurationError(
            f"the recipe {chosen.name!r} is not for a federation",
            "see `curvedp recipes` for those that are",
        )
    if chosen.clipping == "adaptive":
        raise ConfigurationError(
            "adaptive clipping releases a count beside the gradient, and clients do "
            "not send one",
            "choose flat or normalised clipping",
        )
    curvature = chosen.curvature
    if curvature is not None:
        if curvature.probe not in ("synthetic", "public"):
            raise ConfigurationError(
                f"clients cannot agree on a whitener from probe={curvature.probe!r}",
                "take synthetic probes, or public data that every client has",
            )
        if curvature.decay:
            raise ConfigurationError(
                "a client that missed a round could not rebuild a moving average",
                "leave decay at 0",
            )
    return chosen


def checked_parameters(
    values: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str
) -> dict[str, Tensor]:
    """Values with the names and shapes that are due, all of them numbers.

    Raises:
        RoundError: something is missing, has another shape, or is no number.
    """
    if values.keys() != like.keys():
        wrong = sorted(values.keys() ^ like.keys())
        raise RoundError(f"{what}: {wrong[0]!r} is missing or unknown")
    for name, value in values.items():
        if value.shape != like[name].shape:
            raise RoundError(
                f"{what}: {name!r} has the shape {tuple(value.shape)} instead of "
                f"{tuple(like[name].shape)}"
            )
        if not value.is_floating_point():
            raise RoundError(f"{what}: {name!r} has values that are no numbers")
    # in the type they are used in: a large float64 is infinite as a float32
    checked = {name: values[name].to(p.device, p.dtype) for name, p in like.items()}
    for name, value in checked.items():
        if not bool(torch.isfinite(value).all()):
            raise RoundError(f"{what}: {name!r} has values that are no numbers")
    return checked


def open_federated_ledger(
    run_dir: Path | None,
    shared: Shared,
    role: Mapping[str, Any],
    *,
    unsafe: bool = False,
) -> Ledger | MemoryLedger:
    """The ledger of the server or of one client; each keeps its own.

    A run folder that belongs to other settings is refused.
    """
    plan = shared.plan
    notes = (UNSAFE_NOTE,) if unsafe else ()
    header = LedgerHeader(
        run_id=uuid.uuid4().hex,
        relation=plan.federation.relation,
        delta=plan.delta,
        target_epsilon=plan.target_epsilon,
        planned_steps=plan.federation.rounds,
        accountant=plan.accountant,
        unit=plan.federation.unit.value,
        notes=notes,
        facts={
            "curvedp": __version__,
            "recipe": shared.recipe.name,
            "agreement": shared.agreement,
            **role,
            **plan.facts(),
        },
    )
    return open_with(run_dir, header)
