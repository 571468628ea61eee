"""Layers that are called without a batch, served by copies that are followed.

The short way (:class:`~curvedp.layers.direct.Expanded`) puts the batch in front of what
such a layer returns, which is all that ``x + positions(torch.arange(T))`` needs. Where
the model does more with it before it meets the batch, the copies are followed: see
:mod:`curvedp.layers.copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from curvedp.layers.capture import Recording
from curvedp.layers.copies import Meetings
from curvedp.layers.covered import Covered
from curvedp.layers.direct import RuleServer
from curvedp.layers.synthetic import Synthesiser, as_call

__all__ = ["followed"]

#: Of the batches that are learnt from. A dimension of such a size is taken for a batch
#: in one of them and not in the other, and the model is not followed; so rare ones.
_SIZES = (7, 5)


def followed(
    model: nn.Module,
    covered: Sequence[Covered],
    synthesise: Synthesiser,
    parameters: dict[str, Tensor],
    seed: int,
) -> list[Covered] | None:
    """The same sites with their copies followed; None if that is of no use.

    It is none where no layer is called without a batch, where the model cannot be
    followed, or where shapes do not tell the batch from something else.
    """
    if not any(_shared(item) for item in covered):
        return None
    learnt = Meetings()
    try:
        for size in _SIZES:
            batch = synthesise(size, torch.Generator().manual_seed(seed))
            recording = Recording(model, _with(covered, learnt), size)
            recording.forward(*as_call(batch.inputs), parameters)
    except Exception:  # of the model's own code, which knows no such tensors
        return None
    if learnt.batch & learnt.no_batch:
        return None
    return _with(covered, replace(learnt, learning=False))


def _shared(item: Covered) -> bool:
    return isinstance(item.server, RuleServer) and item.server.shared is not None


def _with(covered: Sequence[Covered], meetings: Meetings) -> list[Covered]:
    return [
        replace(item, server=replace(item.server, meetings=meetings))
        if isinstance(item.server, RuleServer) and _shared(item)
        else item
        for item in covered
    ]
