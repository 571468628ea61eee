"""``make_private``: from a model, an optimiser and a dataset to a private loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from curvedp.errors import ConfigurationError, CoverageError, NotPrivateError
from curvedp.layers import Batch, Synthesiser, cover, synthesiser_like
from curvedp.noise import RandomStreams
from curvedp.recipes import Recipe, get_recipe
from curvedp.sampling import PhysicalLoader
from curvedp.sampling.physical import population
from curvedp.train.engine import Engine
from curvedp.train.journal import Journal
from curvedp.train.ledgers import open_ledger
from curvedp.train.losses import per_example_loss
from curvedp.train.private import Private
from curvedp.train.settings import PrivacySettings, default_physical_batch_size

__all__ = ["make_private"]


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    recipe: Recipe | str = "dp-sgd",
    loss: str | nn.Module | Callable[..., Any] | None = None,
    loss_reduction: str = "mean",
    physical_batch_size: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_options: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    journal: bool = True,
    synthetic: Synthesiser | None = None,
    seed: int | None = None,
    unsafe_reproducible_noise: int | None = None,
    **settings: Any,
) -> Private:
    """Attach a privacy plan to a model, its optimiser and its training data.

    Args:
        model: any module without layers that mix examples; it is not changed.
        optimizer: any torch optimiser over all trainable parameters; groups, weight
            decay and schedulers keep working.
        dataset: map-style with a length, or a ``DataLoader``, of which dataset, collate
            function, workers and pinned memory are taken over.
        recipe: which method; its clipping applies, the optimiser is the user's own.
        loss: name, torch loss or function ``(output, targets) -> [B]``. It is checked
            not to mix examples, and ``private.loss`` uses it. Without it, the loss of
            the loop is trusted, and the statement says so.
        loss_reduction: without ``loss``: "mean" or "sum", how the loop's own loss adds
            up the examples of a physical batch.
        physical_batch_size: rows of every batch that the loader yields. It bounds
            memory and has no influence on what is sampled or released.
        collate_fn: as for a ``DataLoader``.
        loader_options: further ``DataLoader`` arguments (``num_workers``, ...).
        run_dir: folder for ledger, journal and checkpoints. Without it the ledger is
            in memory, and a crash loses the record of what was spent.
        journal: keep every release in the run folder until the next checkpoint, so that
            a crash loses no step that was paid for. It writes as many bytes a step as
            the model has; without it, steps since the last checkpoint are paid again.
        synthetic: makes synthetic batches for the attach-time check, where shapes and
            dtypes of the data are not enough to make up valid inputs.
        seed: of the public random streams.
        unsafe_reproducible_noise: a number that makes noise and sampling reproducible,
            for tests. There is no guarantee then.
        **settings: see :class:`curvedp.train.settings.PrivacySettings`: ``epsilon`` or
            ``noise_multiplier``; ``delta``; ``batch_size`` and ``epochs``, or
            ``sample_rate``, ``steps`` and ``expected_batch_size``; ``relation``;
            ``accountant``; ``allow_large_delta``. The recipe's ``clip_norm`` and
            ``clipping`` are taken too.

    Guarantees:
        After any number of the loop's steps, the parameters are (epsilon, delta)-DP
        with the plan's epsilon, under its relation and for what its statement covers.
    """
    chosen = get_recipe(recipe)
    if not chosen.private:
        raise NotPrivateError(
            f"the recipe {chosen.name!r} has no guarantee",
            "train without make_private, or choose a private recipe",
        )
    own = {name: settings.pop(name, None) for name in ("clip_norm", "clipping")}
    chosen = chosen.configure(**own)
    if isinstance(dataset, DataLoader):
        dataset, collate_fn, loader_options = _unpack_loader(
            dataset, collate_fn, loader_options
        )
    plan = PrivacySettings.of(settings).plan(chosen, population(dataset))
    physical = _physical_size(physical_batch_size, plan.sampling.expected_batch_size)
    streams = RandomStreams(seed, unsafe_reproducible_noise=unsafe_reproducible_noise)
    loader = PhysicalLoader(
        dataset,
        plan.sampler(streams),
        physical,
        collate=collate_fn,
        options=loader_options,
    )
    checked_loss = None if loss is None else per_example_loss(loss)
    device = next(model.parameters()).device
    template = _template(loader, device, with_targets=checked_loss is not None)
    coverage = cover(
        model, synthetic or synthesiser_like(template, model), checked_loss
    )
    _check_optimizer(model, optimizer)
    folder = None if run_dir is None else Path(run_dir)
    engine = Engine(
        model=model,
        optimizer=optimizer,
        plan=plan,
        coverage=coverage,
        whitener=chosen.whitener(),
        chain=chosen.chain,
        streams=streams,
        ledger=open_ledger(folder, plan, chosen, unsafe=streams.is_unsafe),
        loader=loader,
        physical_batch_size=physical,
        journal=Journal(folder / "journal") if folder and journal else None,
    )
    return Private(
        engine,
        chosen,
        loss=checked_loss,
        loss_reduction=loss_reduction,
        run_dir=folder,
    )


def _unpack_loader(
    loader: DataLoader[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    options: Mapping[str, Any] | None,
) -> tuple[Any, Callable[[list[Any]], Any] | None, Mapping[str, Any]]:
    """Dataset, collate function and options; its sampler is replaced, or refused."""
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
    if collate_fn is None and loader.collate_fn is not default_collate:
        collate_fn = loader.collate_fn
    taken: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
    if loader.num_workers:
        taken["prefetch_factor"] = loader.prefetch_factor
        taken["persistent_workers"] = loader.persistent_workers
        taken["worker_init_fn"] = loader.worker_init_fn
        taken["multiprocessing_context"] = loader.multiprocessing_context
    kept = {k: v for k, v in taken.items() if v}
    return loader.dataset, collate_fn, {**kept, **(options or {})}


def _physical_size(given: int | None, expected_batch_size: float) -> int:
    if given is None:
        return default_physical_batch_size(expected_batch_size)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigurationError(
            f"physical_batch_size must be a whole number from 1 on, not {given!r}",
            "choose what fits into memory; the result does not depend on it",
        )
    return given


def _template(
    loader: PhysicalLoader, device: torch.device, *, with_targets: bool
) -> Batch:
    """Inputs and targets by the usual convention: a pair, or inputs alone."""
    template = loader.template()
    pair = isinstance(template, tuple | list) and len(template) == 2
    inputs, targets = template if pair else (template, None)
    if with_targets and not pair:
        raise ConfigurationError(
            "with loss=... every example must be a pair (inputs, targets)",
            "return pairs from the dataset or the collate function, or give synthetic=",
        )
    moved = _to(inputs, device), _to(targets, device) if with_targets else None
    return Batch(*moved)


def _to(value: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, value
    )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimiser moves exactly the model's trainable parameters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in held]
    if missing:
        raise CoverageError(
            f"the optimiser does not hold {', '.join(map(repr, missing))}: clipping "
            "would spend the budget on what never moves",
            "freeze it (requires_grad_(False)) or give it to the optimiser",
        )
    foreign = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) not in trainable and p.requires_grad
    ]
    if foreign:
        raise CoverageError(
            f"the optimiser holds {len(foreign)} trainable parameters that are not in "
            "the model",
            "put them into the model, or give them an optimiser of their own",
        )
