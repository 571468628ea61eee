"""What goes between server and clients: a task one way, a noisy update the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.barrier import Release
from curvedp.federated.plan import FederatedPlan
from curvedp.recipes import Recipe

__all__ = ["Task", "Update", "agreement", "digest_of"]


@dataclass(frozen=True)
class Task:
    """What the server asks for. Public: functions of releases and declared facts.

    Attributes:
        run_id: of the run.
        round: numbered from 0.
        agreement: checksum of all that server and clients must have in common.
        parameters: where the gradient is taken.
        whitened_at: parameters that the whitener of this round is made of, where it was
            made in an earlier one; empty otherwise.
    """

    run_id: str
    round: int
    agreement: str
    parameters: Mapping[str, Tensor]
    whitened_at: Mapping[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """Checksum of the question, to know it when it is asked again."""
        own = digest_of({**self.parameters, **_marked(self.whitened_at)})
        return f"{self.run_id}-{self.round}-{own}"


@dataclass(frozen=True)
class Update:
    """What leaves a client: its noisy mean, and nothing else that its data changes.

    Attributes:
        client: number of the client, as the plan lists their sizes.
        run_id: of the run.
        agreement: as in the task.
        release: noisy sum over the declared size.
    """

    client: int
    run_id: str
    agreement: str
    release: Release


def agreement(
    plan: FederatedPlan, recipe: Recipe, model: nn.Module, probe_seed: int
) -> str:
    """Checksum of plan, method, probe seed, and the model's shape and frozen values.

    Whoever has another one would compute another gradient, whiten with another map, or
    keep another account.
    """
    trained = {
        n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad
    }
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    facts = {
        "plan": plan.promises(),
        "recipe": recipe.facts(),
        "trained": trained,
        "frozen": digest_of({**frozen, **dict(model.named_buffers())}),
        "probe_seed": probe_seed,
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def digest_of(values: Mapping[str, Tensor]) -> str:
    """Checksum of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for name in sorted(values):
        tensor = values[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _marked(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {f"whitened_at {name}": value for name, value in values.items()}
