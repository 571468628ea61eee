"""What every loader gives back: arrays, the task, and declared facts.

Nothing here is measured from the examples. The shape, the number of outputs and the
scaling come from the file format or from the user's declaration, because a mean, a
range or a class list taken from private data is a release that nobody paid for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvedp.errors import ConfigurationError, DataError

__all__ = [
    "ArrayDataset",
    "DataSource",
    "Task",
    "check_labels",
    "parse_task",
    "split_validation",
]


class Task(StrEnum):
    """What the targets mean, and so which shape and type they have."""

    CLASSIFICATION = "classification"
    """Targets ``[N]`` of int64 in ``0..num_outputs-1``."""
    REGRESSION = "regression"
    """Targets ``[N, num_outputs]`` of float32."""
    MULTI_LABEL = "multi-label"
    """Targets ``[N, num_outputs]`` of float32, each 0 or 1."""


def parse_task(value: str | Task) -> Task:
    """Read a task from a config file's word.

    Raises:
        ConfigurationError: If the word is not a task; the message lists them.
    """
    try:
        return Task(value)
    except ValueError:
        known = ", ".join(task.value for task in Task)
        raise ConfigurationError(
            f"unknown task {value!r}", f"choose one of: {known}"
        ) from None


class ArrayDataset(TensorDataset):
    """Inputs and targets in memory; ``dataset[indices]`` is one gather per array.

    Args:
        inputs: Shape ``[N, ...]``.
        targets: Shape ``[N]`` or ``[N, num_outputs]``.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets):
            raise DataError(
                "inputs and targets differ in length: "
                f"shapes {tuple(inputs.shape)} and {tuple(targets.shape)}",
                "give one target for each input, along the first dimension",
            )
        super().__init__(inputs, targets)

    @property
    def inputs(self) -> Tensor:
        """All inputs, ``[N, ...]``."""
        return self.tensors[0]

    @property
    def targets(self) -> Tensor:
        """All targets, ``[N]`` or ``[N, num_outputs]``."""
        return self.tensors[1]

    #: ``tensors[k][rows]`` is a batch of those rows.
    gathers_rows = True

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class DataSource:
    """A data set that is ready for training, with what was declared about it.

    Attributes:
        name: The name or the file that was asked for.
        train: The private examples.
        test: Held-out examples, or None when the source has none.
        task: What the targets mean.
        num_outputs: How many outputs the model needs (classes, targets or labels).
        input_shape: Shape of one input.
        facts: Format, scaling, source and licence, for reports. Never a statistic of
            the examples, and never their number.
    """

    name: str
    train: ArrayDataset
    test: ArrayDataset | None
    task: Task
    num_outputs: int
    input_shape: tuple[int, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.test is not None and len(self.test) == 0:
            # met here, and not when all steps are paid for and it is to be evaluated
            raise DataError(
                f"{self.name}: there are no test examples",
                "leave the test part out, or put some into it",
            )
        for part in (self.train, self.test):
            if part is None:
                continue
            if 0 in self.input_shape:
                raise DataError(
                    f"{self.name}: an input is empty, its shape is {self.input_shape}",
                    "every side of an input is 1 or more",
                )
            if tuple(part.inputs.shape[1:]) != self.input_shape:
                raise DataError(
                    f"{self.name}: an input has shape {tuple(part.inputs.shape[1:])} "
                    f"where {self.input_shape} was declared",
                    "the train and test parts must have the same input shape",
                )
            if self.task is Task.CLASSIFICATION:
                check_labels(part, self.num_outputs, source=self.name)
            elif tuple(part.targets.shape[1:]) != (self.num_outputs,):
                raise DataError(
                    f"{self.name}: a target has shape {tuple(part.targets.shape[1:])} "
                    f"where ({self.num_outputs},) was declared",
                    "the train and test parts must have the same number of targets",
                )

    @property
    def num_classes(self) -> int:
        """The number of classes.

        Raises:
            ConfigurationError: If the task is not a classification.
        """
        if self.task is not Task.CLASSIFICATION:
            raise ConfigurationError(
                f"{self.name} is a {self.task.value} task and has no classes",
                "use num_outputs",
            )
        return self.num_outputs


def check_labels(
    dataset: ArrayDataset, num_classes: int, *, source: str = "the data set"
) -> None:
    """Refuse labels that are not integers in ``0..num_classes-1``.

    The message says where the first such label is, and never what it is: a message may
    end in a shared log.

    Raises:
        DataError: If a label is out of range, or labels are not a list of integers.
    """
    targets = dataset.targets
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        raise DataError(
            f"{source}: labels have shape {tuple(targets.shape)} and type "
            f"{targets.dtype}",
            "class labels are one integer for each example",
        )
    outside = (targets < 0) | (targets >= num_classes)
    if bool(outside.any()):
        first = int(outside.int().argmax())
        raise DataError(
            f"{source}: the label of example {first} lies outside 0..{num_classes - 1}",
            "declare the true number of classes, or correct the file",
        )


def split_validation(
    dataset: ArrayDataset, fraction: float, seed: int, *, by_content: bool = False
) -> tuple[ArrayDataset, ArrayDataset]:
    """Set apart about ``fraction`` of the examples, each by its own coin.

    Neighbouring data sets must be divided into parts of which one differs by one
    example, and the other not at all. A shuffle cut at ``fraction * N`` would move many
    examples when one is added. The sizes are therefore random.

    - By place: example i goes by the i-th number of a stream. For neighbours in which
      one example is another one, or nothing, at its place.
    - By content: an example goes by a hash of its own bytes, wherever it stands. For
      neighbours of which one has an example more, anywhere. Equal examples go together.

    Args:
        dataset: The examples to divide.
        fraction: Chance of each example to go to the validation part, in (0, 1).
        seed: Seed of the coins; the same seed gives the same split.
        by_content: Instead of by place.

    Returns:
        The training part and the validation part.

    Raises:
        ConfigurationError: If ``fraction`` is not inside (0, 1).
        DataError: If a part came out empty.
    """
    if not (math.isfinite(fraction) and 0 < fraction < 1):
        raise ConfigurationError(
            f"fraction is {fraction}", "a validation fraction lies between 0 and 1"
        )
    if by_content:
        coins = _coins_of_content(dataset, seed)
    else:
        # numpy's legacy stream: its values are frozen by policy, and the first N of
        # them do not depend on N (those of torch.rand do, by its vectorised path).
        coins = np.random.RandomState(seed).random_sample(len(dataset))
    held_out = torch.from_numpy(coins < fraction)
    if bool(held_out.all()) or not bool(held_out.any()):
        raise DataError(
            f"a validation fraction of {fraction} leaves one part empty",
            "use another fraction, or more examples",
        )
    return ArrayDataset(*dataset[~held_out]), ArrayDataset(*dataset[held_out])


def _coins_of_content(dataset: ArrayDataset, seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each example, from its input and target alone."""
    key = seed.to_bytes(16, "big", signed=True)
    rows = [
        x.detach().cpu().contiguous().numpy() for x in (dataset.inputs, dataset.targets)
    ]
    words = [
        hashlib.blake2b(
            inputs.tobytes() + targets.tobytes(), digest_size=8, key=key
        ).digest()
        for inputs, targets in zip(*rows, strict=True)
    ]
    drawn = np.frombuffer(b"".join(words), dtype=">u8") >> np.uint64(11)
    return drawn.astype(np.float64) / 2.0**53
