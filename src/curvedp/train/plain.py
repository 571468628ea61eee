"""The non-private reference: the same batches and optimiser, no clipping, no noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from curvedp.errors import withheld
from curvedp.layers import as_call
from curvedp.layers.coverage import set_training_mode
from curvedp.train.datasets import TrainingData, moved

if TYPE_CHECKING:
    from curvedp.train.trainer import Trainer

__all__ = ["fit_without_privacy"]


def fit_without_privacy(
    trainer: Trainer, optimiser: torch.optim.Optimizer, dataset: Any
) -> int:
    """Train without any guarantee; returns the number of steps.

    Batches are Poisson-sampled as in a private run, so that the difference between the
    two is what privacy costs and nothing else.
    """
    model = trainer.model
    sampling = trainer.settings.sampling(TrainingData.of(dataset).size)
    loader = trainer.loader(dataset, sampling)
    device = next(model.parameters()).device
    set_training_mode(model)
    optimiser.zero_grad()
    total = torch.zeros((), device=device)
    divisor = sampling.expected_batch_size * loader.views
    with trainer.reproducible_forward(device) as seed_step:
        seeded = -1
        for batch in loader.steps(0, sampling.steps):
            if seeded != (seeded := batch.step):
                seed_step(batch.step)
            inputs, targets = moved(tuple(batch.data), device)
            args, kwargs = as_call(inputs)
            with withheld("the model or its loss"):
                with trainer.forward_precision.during_forward():
                    output = model(*args, **kwargs)
                output = trainer.forward_precision.outputs(output)
                losses = trainer.loss(output, targets)
                present = batch.present.to(device)
                loss = torch.where(present, losses, torch.zeros_like(losses)).sum()
                torch.autograd.backward(loss / divisor)
            total = total + loss.detach() / divisor
            if batch.completes:
                optimiser.step()
                optimiser.zero_grad()
                rate = optimiser.param_groups[0]["lr"]
                trainer.report(batch.step + 1, sampling.steps, rate, total)
                total = torch.zeros((), device=device)
                if trainer.stop_requested():
                    return batch.step + 1
    return sampling.steps
