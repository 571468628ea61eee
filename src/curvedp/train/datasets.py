"""The user's data and how it is fetched, taken over from whatever form it comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from curvedp.errors import ConfigurationError
from curvedp.layers import Batch
from curvedp.noise import RandomStreams, Stream
from curvedp.sampling import People, PhysicalLoader, Prepare, Sampler, Views
from curvedp.sampling.physical import population
from curvedp.sampling.prepare import prepared
from curvedp.sampling.rows import Collate, RowCollate
from curvedp.train.settings import default_physical_batch_size

__all__ = ["Augment", "TrainingData", "as_batch", "chosen_views", "moved"]

#: An augmentation by name, or a function ``(inputs, generator) -> inputs``.
Augment = str | Callable[[Tensor, torch.Generator], Tensor]

#: DataLoader arguments that say what is sampled; the plan says that.
_SAMPLING = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


@dataclass(frozen=True)
class TrainingData:
    """A map-style dataset with its collate function and DataLoader options.

    ``prepare`` makes of each batch what the loop gets.
    """

    dataset: Any
    collate: Collate | None
    options: Mapping[str, Any]
    people: People | None = None
    prepare: Prepare | None = None
    sample: Sequence[Any] | None = None

    @classmethod
    def of(
        cls,
        dataset: Any,
        collate_fn: Collate | None = None,
        loader_options: Mapping[str, Any] | None = None,
        people: People | None = None,
        prepare: Prepare | None = None,
        sample: Sequence[Any] | None = None,
    ) -> TrainingData:
        """From a dataset, or from a DataLoader whose sampler is replaced."""
        options = dict(loader_options or {})
        _refuse_options(options)
        fixed = [name for name in _SAMPLING if name in options]
        if fixed:
            raise ConfigurationError(
                f"loader_options cannot have {', '.join(fixed)}: the plan says what is "
                "sampled",
                "declare batch_size and epochs, or sample_rate, steps and "
                "expected_batch_size; physical_batch_size bounds memory",
            )
        collate_fn = options.pop("collate_fn", None) or collate_fn
        if not isinstance(dataset, DataLoader):
            people = _matching(people, dataset)
            return cls(dataset, collate_fn, options, people, prepare, sample)
        _refuse_sampler(dataset)
        if collate_fn is None and dataset.collate_fn is not default_collate:
            collate_fn = dataset.collate_fn
        options = {**_options(dataset), **options}
        dataset = dataset.dataset
        people = _matching(people, dataset)
        return cls(dataset, collate_fn, options, people, prepare, sample)

    @cached_property
    def rows(self) -> RowCollate:
        """The collate function, tried: also where it is torch's."""
        return RowCollate.of(self.dataset, self.collate, self.sample)

    @property
    def size(self) -> int:
        """Number of units. Public or private as the relation says."""
        return population(self.dataset) if self.people is None else len(self.people)

    @property
    def tokenizer(self) -> Any:
        """The collate function's, where it holds one, as collators for text do."""
        return getattr(self.collate, "tokenizer", None)

    @property
    def device(self) -> torch.device:
        """That batches are on when the loader gives them."""
        tensors = getattr(self.dataset, "tensors", ())
        devices = (t.device for t in tensors if isinstance(t, Tensor))
        return next(devices, torch.device("cpu"))

    def template(self, device: torch.device, *, with_targets: bool) -> Batch:
        """Shapes of inputs and targets: a pair by convention, or inputs alone."""
        template = self.rows.template
        if self.prepare is not None:
            template = prepared(self.prepare, template, rows=1)
        return as_batch(template, device, with_targets=with_targets)

    def slots(self, views: Views | None) -> int:
        """Rows of one unit: of a person, or of an example's views."""
        if views is not None:
            return views.count
        return 1 if self.people is None else self.people.slots

    def physical_size(
        self,
        expected_batch_size: float,
        physical_batch_size: int | str | None,
        activation_bytes: int = 0,
        device: str = "cpu",
        views: Views | None = None,
    ) -> int:
        """Rows of a physical batch: whole units; by default of a fitting size."""
        size, slots = physical_batch_size, self.slots(views)
        if size is None:
            size = default_physical_batch_size(
                expected_batch_size * slots, activation_bytes, device
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError(
                "physical_batch_size must be a whole number from 1 on or 'auto', not "
                f"{size!r}",
                "choose what fits into memory; the result does not depend on it",
            )
        return slots * max(1, size // slots)

    def loader(
        self,
        sampler: Sampler,
        expected_batch_size: float,
        physical_batch_size: int | str | None,
        activation_bytes: int = 0,
        device: str = "cpu",
        views: Views | None = None,
    ) -> PhysicalLoader:
        """Physical batches of what the sampler draws, of that many rows."""
        return PhysicalLoader(
            self.dataset,
            sampler,
            self.physical_size(
                expected_batch_size,
                physical_batch_size,
                activation_bytes,
                device,
                views,
            ),
            collate=self.rows,
            options=self.options,
            people=self.people,
            views=views,
            prepare=self.prepare,
        )


def chosen_views(
    augment: Augment | None,
    count: int,
    streams: RandomStreams,
    people: People | None = None,
) -> Views | None:
    """Views of each example, drawn from a secret stream; None without augmentation."""
    if augment is None:
        if count != 1:
            raise ConfigurationError(
                f"{count} views of an example without an augmentation are all the same",
                'give augment="flips-and-crops" or a function, or views=1',
            )
        return None
    if people is not None:
        raise ConfigurationError(
            "several views of an example and persons with several examples do not go "
            "together yet",
            "leave one of them out, or augment in the dataset",
        )

    def generator(step: int, portion: int) -> torch.Generator:
        seed = streams.torch_seed(Stream.VIEWS, step, portion)
        return torch.Generator().manual_seed(seed % 2**63)

    return Views.of(augment, count, generator)


def as_batch(batch: Any, device: torch.device, *, with_targets: bool) -> Batch:
    """Inputs and targets of what collate gave: a pair by convention, or inputs."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if with_targets and not pair:
        raise ConfigurationError(
            "with a loss every example must be a pair (inputs, targets)",
            "return pairs from the dataset or the collate function",
        )
    inputs, targets = batch if pair else (batch, None)
    return Batch(
        moved(inputs, device), moved(targets, device) if with_targets else None
    )


def moved(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on a device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def _matching(people: People | None, dataset: Any) -> People | None:
    if people is not None and people.examples != population(dataset):
        raise ConfigurationError(
            "people does not have one id for each example of the dataset",
            "give as many ids as there are examples, in the dataset's order",
        )
    return people


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse what would hand portions over in another order, or is no option."""
    if not options.get("in_order", True):
        raise ConfigurationError(
            "loader_options has in_order=False: a portion that comes early would be "
            "taken for another one, of another step",
            "leave in_order out; a higher prefetch_factor hides slow examples",
        )
    known = signature(DataLoader).parameters.keys() - {"dataset"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigurationError(
            f"loader_options cannot have {', '.join(unknown)}",
            f"a DataLoader takes: {', '.join(sorted(known - set(_SAMPLING)))}",
        )


def _refuse_sampler(loader: DataLoader[Any]) -> None:
    population(loader.dataset)
    sampler = loader.sampler
    plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement
    )
    if not plain or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ConfigurationError(
            f"the DataLoader draws with {type(sampler).__name__}, and the guarantee "
            "needs Poisson sampling",
            "leave the sampler out; weights belong into a loss that is declared "
            "without looking at private counts",
        )


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a DataLoader was told besides sampling."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["worker_init_fn"] = loader.worker_init_fn
        options["multiprocessing_context"] = loader.multiprocessing_context
    return {name: value for name, value in options.items() if value}
