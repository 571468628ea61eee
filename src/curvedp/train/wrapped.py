"""The loop's model and loader: the user's own, with a private pass in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from curvedp.errors import withheld
from curvedp.layers.coverage import set_training_mode
from curvedp.train.engine import Engine

__all__ = ["PrivateLoader", "PrivateModel"]


class PrivateModel(nn.Module):
    """The user's model; a training pass is recorded, any other runs as it is.

    Its ``state_dict`` has the same keys as the user's model.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.model
        self._engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Recorded when training with gradients enabled."""
        with withheld("private.model"):
            if self.training and torch.is_grad_enabled():
                return self._engine.forward(args, kwargs)
            return self._engine.unrecorded(args, kwargs)

    def train(self, mode: bool = True) -> PrivateModel:
        """As usual, but a BatchNorm that was frozen when it was attached stays so."""
        self.training = mode
        set_training_mode(self.module, mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self._engine.attached.state.require_closed()
        return dict(self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._engine.attached.state.give_up()
        return self.module.load_state_dict(*args, **kwargs)


class PrivateLoader:
    """Poisson batches in physical portions; ``len`` counts logical steps.

    One pass makes an epoch's steps (all steps, if sampling was declared by rate) or as
    many as the budget still allows.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        return self._engine.plan.sampling.epoch_steps

    def __iter__(self) -> Iterator[Any]:
        engine = self._engine
        if engine.steps_left == 0:
            raise engine.exhausted()
        epoch = engine.plan.sampling.epoch_steps
        for batch in engine.batches(epoch - engine.step % epoch):
            yield batch.data
