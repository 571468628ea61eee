"""Metrics on data that is public or held out: accuracy, AUC, F1, loss.

A metric on private data is a release that nobody paid for. These functions know nothing
of that; whoever calls them has to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from curvedp.errors import ConfigurationError, withheld
from curvedp.layers import as_call
from curvedp.train.datasets import moved

__all__ = ["METRICS", "evaluate", "predict"]

Array = npt.NDArray[Any]


def predict(
    model: nn.Module, dataset: Any, batch_size: int = 512
) -> tuple[Array, Array]:
    """Outputs and targets of every example, in evaluation mode."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    outputs, targets = [], []
    try:
        with torch.no_grad(), withheld("the model or the data that it is judged on"):
            for inputs, y in DataLoader(dataset, batch_size=batch_size):
                args, kwargs = as_call(moved(inputs, device))
                outputs.append(model(*args, **kwargs).float().cpu().numpy())
                targets.append(y.numpy())
    finally:
        model.train(training)
    return np.concatenate(outputs), np.concatenate(targets)


def accuracy(outputs: Array, targets: Array) -> float:
    """Share of examples (of labels, if multi-label) that are predicted right."""
    return float(np.mean(_predicted(outputs, targets) == targets))


def f1(outputs: Array, targets: Array) -> float:
    """F1 score, averaged over classes (labels)."""
    predicted = _one_hot(_predicted(outputs, targets), outputs)
    actual = _one_hot(targets, outputs)
    hits = (predicted * actual).sum(0)
    total = predicted.sum(0) + actual.sum(0)
    scores = np.divide(2 * hits, total, out=np.zeros(len(hits)), where=total > 0)
    return float(scores[actual.sum(0) > 0].mean())


def auc(outputs: Array, targets: Array) -> float:
    """Area under the ROC curve, one class against the rest, averaged over classes."""
    # here, because scipy.stats would take most of the time of `import curvedp`
    from scipy.special import softmax
    from scipy.stats import rankdata

    actual = _one_hot(targets, outputs)
    scores = softmax(outputs, axis=1) if targets.ndim == 1 else outputs
    areas = []
    for column in range(actual.shape[1]):
        positive = actual[:, column] > 0.5
        p, n = int(positive.sum()), int((~positive).sum())
        if p and n:
            ranks = rankdata(scores[:, column])
            areas.append((ranks[positive].sum() - p * (p + 1) / 2) / (p * n))
    if not areas:
        raise ConfigurationError(
            "AUC needs examples of at least two classes", "choose another metric"
        )
    return float(np.mean(areas))


def _predicted(outputs: Array, targets: Array) -> Array:
    if targets.ndim == 1 and np.issubdtype(targets.dtype, np.integer):
        return np.asarray(outputs.argmax(1))
    return (outputs.reshape(targets.shape) > 0).astype(targets.dtype)


def _one_hot(labels: Array, outputs: Array) -> Array:
    if labels.ndim > 1:
        return labels.astype(float)
    return np.eye(outputs.shape[1])[labels]


#: Metrics of outputs and targets by name; ``loss`` is added by :func:`evaluate`.
METRICS: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": accuracy,
    "auc": auc,
    "f1": f1,
}


def evaluate(
    model: nn.Module,
    dataset: Any,
    loss: Callable[[Any, Any], Tensor],
    metrics: tuple[str, ...] = ("accuracy", "loss"),
) -> dict[str, float]:
    """The named metrics on a dataset that is public or held out."""
    unknown = [m for m in metrics if m not in METRICS and m != "loss"]
    if unknown:
        raise ConfigurationError(
            f"unknown metric {', '.join(unknown)}",
            f"choose from: {', '.join([*METRICS, 'loss'])}",
        )
    outputs, targets = predict(model, dataset)
    values = {}
    with withheld("the loss or a metric"):
        for name in metrics:
            if name == "loss":
                losses = loss(torch.from_numpy(outputs), torch.from_numpy(targets))
                values[name] = float(losses.mean())
            else:
                values[name] = METRICS[name](outputs, targets)
    return values
