"""Does an augmentation make each view of its own example alone?

Mixup, CutMix and statistics of the batch tie examples together before the model sees
them: without one example, the views of others change. So it is tried on synthetic rows,
as the model is (:mod:`curvedp.train.coupling`): half of them get other contents, and
not a bit of the other views may change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import CouplingError
from curvedp.layers import Batch, Synthesiser
from curvedp.layers.generators import Generators
from curvedp.layers.perturb import KINDS, PLAIN, bits, replaced, varied
from curvedp.sampling import Views
from curvedp.train.coupling import FEW_ROWS, MANY_STATES, MOST_ROWS
from curvedp.train.datasets import moved

__all__ = ["try_augmentation"]


def try_augmentation(
    views: Views,
    synthesise: Synthesiser,
    rows: int,
    device: torch.device,
    *,
    made_up: bool = True,
) -> None:
    """Refuse views that depend on other examples.

    Args:
        views: of every example.
        synthesise: makes synthetic batches.
        rows: of a physical batch.
        device: that the data is on when views are made of it.
        made_up: whether inputs are any numbers, which may be scaled as well.

    Raises:
        CouplingError: they do, or differ between equal calls.
    """
    units = min(rows, MOST_ROWS) // views.count
    if units < 2:
        return

    def make(size: int, generator: torch.Generator) -> Batch:
        return Batch(moved(synthesise(size, generator).inputs, device), None)

    drawn = make(units, torch.Generator().manual_seed(0))
    kinds = KINDS if made_up else PLAIN
    if kinds != PLAIN:
        try:
            _shown(views, varied(drawn, kinds).inputs, 0)
        except Exception:  # it is not for any numbers
            kinds = PLAIN
    batch = varied(drawn, kinds)
    once, again = (_shown(views, batch.inputs, 0) for _ in range(2))
    if not _equal(once, again):
        raise CouplingError(
            f"the augmentation {views.name!r} makes other views of the same rows when "
            "it is called again: coupling of examples would hide under that",
            "draw from the generator that it is given, or from torch's global one",
        )
    _refuse_mixed(views, batch, list(replaced(batch, make, kinds)), bits(units))
    few = make(min(units, FEW_ROWS), torch.Generator().manual_seed(0))
    try:
        _shown(views, few.inputs, 0)
        batch = varied(few, kinds)
    except Exception:  # it is for portions of one size
        pass
    _refuse_mixed(views, batch, list(replaced(batch, make, kinds)), MANY_STATES)


def _refuse_mixed(
    views: Views, batch: Batch, changes: list[tuple[Tensor, Batch]], states: int
) -> None:
    """By turns from so many random states, for what is mixed in some of them."""
    before = [_shown(views, batch.inputs, state) for state in range(states)]
    for k in range(max(len(changes), states)):
        changed, mixed = changes[k % len(changes)]
        kept = ~changed.repeat_interleave(views.count)
        after = _shown(views, mixed.inputs, k % states)
        if not _equal(before[k % states][kept], after[kept]):
            raise CouplingError(
                f"the augmentation {views.name!r} changes the views of one example "
                "when another example of the batch changes",
                "make each view of its own row alone: no mixup, no CutMix, no mean or "
                "largest value over the batch",
            )


def _shown(views: Views, inputs: Any, seed: int) -> Tensor:
    """Views of these inputs, from the same random state for the same seed."""
    device = inputs.device if isinstance(inputs, Tensor) else torch.device("cpu")
    fixed = replace(views, generator=lambda *_: torch.Generator().manual_seed(seed))
    generators = Generators(views.augment, device)
    with torch.random.fork_rng():
        generators.seed(seed)
        try:
            shown = fixed.expand(inputs, 0, 0)
        finally:
            generators.put_back()
    assert isinstance(shown, Tensor)  # or making views of it would have failed
    return shown.cpu()


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
