"""Settings of recipes that start from parameters trained on public data."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from curvedp.errors import ConfigurationError
from curvedp.recipes.types import check_choice, check_least, check_types

__all__ = ["PRETRAIN_LABELS", "Pretraining"]

#: Those of the public examples; one for each of them at random, which stays; or none.
PRETRAIN_LABELS = ("own", "random", "simclr")


@dataclass(frozen=True)
class Pretraining:
    """Plain SGD on a dataset that is declared public, before the first private step.

    Attributes:
        pretrain_epochs: passes over the public dataset, in the number of its batches;
            0 for no pretraining.
        pretrain_batch_size: examples of a batch, drawn at random.
        pretrain_learning_rate: of SGD, constant.
        pretrain_momentum: of SGD.
        pretrain_labels: "own" labels of the public examples. Where they have none:
            "random" ones, so that inputs are told apart; or "simclr", where two views
            of an image are to be known among those of others.
        pretrain_temperature: of SimCLR.
    """

    pretrain_epochs: int = 10
    pretrain_batch_size: int = 64
    pretrain_learning_rate: float = 0.05
    pretrain_momentum: float = 0.9
    pretrain_labels: str = "own"
    pretrain_temperature: float = 0.5

    def __post_init__(self) -> None:
        check_types(self.facts(), {f.name: str(f.type) for f in fields(Pretraining)})
        check_choice("pretrain_labels", self.pretrain_labels, PRETRAIN_LABELS)
        check_least("pretrain_epochs", self.pretrain_epochs, 0)
        least = 2 if self.pretrain_labels == "simclr" else 1  # others to be told from
        check_least("pretrain_batch_size", self.pretrain_batch_size, least)
        check_least("pretrain_momentum", self.pretrain_momentum, 0.0)
        for name in ("pretrain_learning_rate", "pretrain_temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(
                    f"{name} is {value!r}", "give a positive number"
                )

    @staticmethod
    def setting_names() -> list[str]:
        """What a user may set."""
        return [f.name for f in fields(Pretraining)]

    def facts(self) -> dict[str, Any]:
        """All settings as JSON values."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def steps(self, examples: int) -> int:
        """Of a public dataset with so many examples."""
        return self.pretrain_epochs * max(1, examples // self.pretrain_batch_size)
