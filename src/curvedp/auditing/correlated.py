r"""Scores of canaries where the noise of a run's steps is correlated.

With strategy ``K`` the releases of a block are ``S + s C K^-1 z``. Whoever knows K can
undo the correlation: ``K (S + s C K^-1 z) = K S + s C z``. A canary that was drawn in
step t alone adds ``v_t`` to ``S_t``, so ``K[:, t] v_t`` to that, and the likelihood
ratio of a step becomes the usual one with

.. math::  \langle r, v \rangle = \sum_k X_{tk} \langle r_k, v_t \rangle, \qquad
    \|v\|^2 = X_{tt} \|v_t\|^2, \qquad X = K^T K.

Steps of one group are at least as far apart as K has bands, so their columns do not
meet, and the ratios of a group's steps add up. The attacker does not know the groups
and takes the mean over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from curvedp.auditing.directions import Directions
from curvedp.auditing.evidence import likelihood_ratio
from curvedp.noise import CorrelatedMechanism

__all__ = ["SeenStep", "joint_ratios"]

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SeenStep:
    """What an attacker has seen of a step.

    Attributes:
        residual: the release less the sum of the others.
        chunks: what canaries would have added, for each kind of canary.
        frame: of the release; another one begins a new block of noise.
    """

    residual: dict[str, Tensor]
    chunks: Sequence[Sequence[Directions]]
    frame: str


def joint_ratios(
    steps: Sequence[SeenStep], mechanism: CorrelatedMechanism, groups: int, rate: float
) -> list[Scores]:
    """The log likelihood ratio of every canary, for each kind of canary.

    Args:
        steps: all steps of a run, from the first one on.
        mechanism: of the run.
        groups: b, which take turns.
        rate: of sampling within a group.
    """
    strategy = mechanism.strategy.materialize()
    variance = (mechanism.noise_multiplier * mechanism.bound) ** 2
    kinds = len(steps[0].chunks)
    count = sum(own.ios[0].batch_size for own in steps[0].chunks[0])
    totals = np.zeros((kinds, groups, count))
    for block in _blocks(steps):
        square = strategy[block.start : block.stop, block.start : block.stop]
        weights = square.T @ square
        for t in block:
            row = weights[t - block.start]
            mixed = _mixed([steps[k].residual for k in block], row)
            for kind, chunks in enumerate(steps[t].chunks):
                with torch.no_grad():
                    projected = torch.cat([own.projections(mixed) for own in chunks])
                    squared = torch.cat([own.sq_norms() for own in chunks])
                totals[kind, t % groups] += likelihood_ratio(
                    projected.double().cpu().numpy(),
                    row[t - block.start] * squared.double().cpu().numpy(),
                    variance,
                    rate,
                )
    means = np.logaddexp.reduce(totals, 1) - math.log(groups)
    return list(means)


def _blocks(steps: Sequence[SeenStep]) -> Iterator[range]:
    """Steps whose noise belongs together."""
    start = 0
    for k in range(1, len(steps) + 1):
        if k == len(steps) or steps[k].frame != steps[start].frame:
            yield range(start, k)
            start = k


def _mixed(
    residuals: Sequence[dict[str, Tensor]], weights: npt.NDArray[np.float64]
) -> dict[str, Tensor]:
    near = [(r, float(w)) for r, w in zip(residuals, weights, strict=True) if w]
    return {
        name: torch.stack([w * r[name].double() for r, w in near]).sum(0)
        for name in residuals[0]
    }
