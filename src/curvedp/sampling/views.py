r"""Several random views of an example, averaged before they are clipped.

Augmentation multiplicity (De et al., "Unlocking High-Accuracy Differentially Private
Image Classification through Scale", 2022): the gradient of example i is

    g_i = 1/K sum_k grad loss(T_k x_i, y_i)

and is clipped as one vector. The example is still the unit, so K views cost as much
privacy as one, and sampling and noise stay what they are.

Which views are drawn is public randomness: it has nothing to do with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from curvedp.errors import ConfigurationError, DataError, withheld

__all__ = ["AUGMENTATIONS", "Views", "crops", "flips", "flips_and_crops"]

#: From ``x [N, ...]`` and a generator to as many views, each drawn on its own.
Augmentation = Callable[[Tensor, torch.Generator], Tensor]

#: Pixels that a crop may be moved by, in each direction.
PADDING = 4


@dataclass(frozen=True)
class Views:
    """How many views of each example a step takes, and what a view is.

    Attributes:
        count: K.
        augment: makes views of ``x [N, ...]``, one a row.
        name: for statements and stored settings.
        generator: gives the public generator of a step and a portion of it.
    """

    count: int
    augment: Augmentation
    name: str
    generator: Callable[[int, int], torch.Generator]

    @classmethod
    def of(
        cls,
        augment: str | Augmentation,
        count: int,
        generator: Callable[[int, int], torch.Generator],
    ) -> Views:
        """From a name or a function."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigurationError(
                f"views must be a whole number from 1 on, not {count!r}",
                "say how many views of an example are averaged in a step",
            )
        if isinstance(augment, str):
            if augment not in AUGMENTATIONS:
                raise ConfigurationError(
                    f"unknown augmentation {augment!r}",
                    f"choose one of: {', '.join(AUGMENTATIONS)}; or give a function "
                    "(inputs, generator) -> inputs",
                )
            return cls(count, AUGMENTATIONS[augment], augment, generator)
        name = getattr(augment, "__name__", type(augment).__name__)
        return cls(count, augment, name, generator)

    def expand(self, data: Any, step: int, portion: int) -> Any:
        """K rows for each row of a batch, which stand together; inputs augmented."""
        pair = isinstance(data, tuple | list) and len(data) == 2
        inputs = data[0] if pair else data
        if not isinstance(inputs, Tensor):
            raise DataError(
                "views are made of inputs that are one tensor, and these are "
                f"{type(inputs).__name__}",
                "augment in the dataset instead, with views=1",
            )
        with withheld("augment"):
            shown = self.augment(self._repeated(inputs), self.generator(step, portion))
        if shown.shape != (len(inputs) * self.count, *inputs.shape[1:]):
            raise DataError(
                f"the augmentation {self.name!r} made {tuple(shown.shape)} of "
                f"{(len(inputs) * self.count, *inputs.shape[1:])}",
                "return as many views as there were rows, in their shape",
            )
        return (shown, tree_map(self._repeated, data[1])) if pair else shown

    def _repeated(self, x: Any) -> Any:
        return x.repeat_interleave(self.count, 0) if isinstance(x, Tensor) else x


def flips(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image ``[C, H, W]`` is mirrored left to right with probability 1/2."""
    _require_images(x)
    chosen = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(chosen.to(x.device)[:, None, None, None], x.flip(-1), x)


def crops(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image is moved by up to 4 pixels in both directions, zeros behind it."""
    _require_images(x)
    n, _, height, width = x.shape
    padded = F.pad(x, (PADDING,) * 4)
    moves = torch.randint(0, 2 * PADDING + 1, (2, n, 1), generator=generator)
    down, right = moves.to(x.device)
    rows = down + torch.arange(height, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    each = torch.arange(n, device=x.device)[:, None, None]
    # indices around the channels: [N, H, W, C]
    moved = padded[each, :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def flips_and_crops(x: Tensor, generator: torch.Generator) -> Tensor:
    """Both, as is usual for small photographs."""
    return crops(flips(x, generator), generator)


#: By name.
AUGMENTATIONS: dict[str, Augmentation] = {
    "flips": flips,
    "crops": crops,
    "flips-and-crops": flips_and_crops,
}


def _require_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise DataError(
            "flips and crops are of images [C, H, W], and an input is "
            f"{tuple(x.shape[1:])}",
            "give a function (inputs, generator) -> inputs of your own",
        )
