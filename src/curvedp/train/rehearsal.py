"""What can be known to fail is found at attach time, before the first payment.

A step is paid for before its noise is drawn, and what fails afterwards has cost its
price for nothing. So an optimiser makes two steps on copies of its parameters, and a
release and a checkpoint are written into the run's folder, read back and removed.

The trial is nobody's business but its own: gradients come from a generator with a seed
of its own, and the user's optimiser, its state, hooks and schedulers, and the global
generators are as they were.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.errors import CheckpointError, ConfigurationError, CurvedpError
from curvedp.noise import restore_release
from curvedp.recipes import Recipe
from curvedp.storage import soon_removed
from curvedp.train.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
)
from curvedp.train.engine import Engine
from curvedp.train.journal import Journal, group_settings
from curvedp.train.optimizer import PrivateOptimizer

__all__ = ["Rehearsed", "rehearse", "rehearse_folder", "rehearse_journal"]

#: A rate below this is raised to it: schedules begin at zero, and whether anything
#: moves is to be seen in bfloat16 too.
_RATES = (1e-3, 1e3)
#: Gradients repeat so many numbers: to draw more would take longer than all else.
_FEW = 997
#: Lists with an entry for each parameter of a group.
_OF_EACH = ("params", "param_names")
#: Beyond those of any run.
_NO_STEP = 10**10
#: What a copy misses that holds its buffers by the address of a parameter.
_OF_A_COPY = (AttributeError, LookupError)


@dataclass(frozen=True)
class Rehearsed:
    """How the optimiser was tried.

    Attributes:
        how: for the statement.
        remarks: for the ledger, on an optimiser that is not the recipe's.
        state: as its ``state_dict`` looks after a step; None if it was not copied.
    """

    how: str
    remarks: tuple[str, ...] = ()
    state: dict[str, Any] | None = None


def rehearse(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Rehearsed:
    """Try an optimiser on a copy of one parameter of each shape in each group.

    One that cannot be copied is tried by its signature.

    Raises:
        ConfigurationError: its step fails, moves nothing, or gives what is not finite;
            or the recipe rests on another one.
    """
    if isinstance(optimizer, PrivateOptimizer):
        raise ConfigurationError(
            "the optimiser is that of a run that is attached already",
            "build a new one, and call make_private with it",
        )
    remark = recipe.remark_on(optimizer)
    remarks = () if remark is None else (remark,)
    by_signature = Rehearsed("the optimiser, by its step's signature alone", remarks)
    _refuse_arguments(optimizer)
    try:
        copied = _copy(optimizer)
    except Exception:  # of whatever somebody's class keeps: locks, files, devices
        return by_signature
    try:
        state = _steps(copied)
    except ConfigurationError:
        raise
    except Exception as error:
        of_torch = type(optimizer).__module__.startswith("torch.")
        if isinstance(error, _OF_A_COPY) and not of_torch:
            return by_signature
        raise _fails(optimizer, f"{type(error).__name__}: {error}") from None
    return Rehearsed("the optimiser, on copies of parameters", remarks, state)


def rehearse_journal(
    folder: Path,
    ledger: Ledger | MemoryLedger,
    values: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """Write a release of zeros into a run's journal, read it back and remove it.

    Args:
        folder: of the journal.
        ledger: of the run, which is open.
        values: tensors of the shapes that are released, by name.
        groups: what is kept beside a release.

    Raises:
        CurvedpError: it could not be written, or read.
    """
    zeros = {
        name: torch.zeros_like(v, dtype=torch.float32) for name, v in values.items()
    }
    with _trial(folder, "a release") as trial:
        journal = Journal(trial, ledger)
        journal.write(restore_release(zeros, "trial", _NO_STEP, noise_std=1.0), groups)
        found = journal.read(_NO_STEP)
    if found is None or found[1] != groups:
        raise CheckpointError(
            f"a release written into {folder} could not be read again",
            "keep numbers, strings, lists and tuples in the optimiser's groups; or "
            "choose a folder on another disk",
        )


def rehearse_folder(
    folder: Path, engine: Engine, checkpoint: Checkpoint, tried: Rehearsed
) -> None:
    """Write what a step and a checkpoint will write, read it back and remove it.

    With the optimiser's state as it is after a step, where that is known.

    Raises:
        CurvedpError: something of it cannot be written or read.
    """
    if engine.journal is not None:
        groups = group_settings(engine.optimizer)
        rehearse_journal(folder / "journal", engine.ledger, engine.parameters, groups)
    if tried.state is not None:
        state = {**checkpoint.state, "optimizer": tried.state}
        checkpoint = replace(checkpoint, state=state)
    with _trial(folder / "checkpoints", "a checkpoint") as trial:
        save_checkpoint(trial, checkpoint)
        load_checkpoint(checkpoint_folders(trial)[-1])


@contextmanager
def _trial(folder: Path, what: str) -> Iterator[Path]:
    """A folder within this one, whose name with a dot nobody reads; it is removed."""
    made = not folder.exists()
    trial = folder / f".trial.{os.getpid()}.tmp"
    try:
        with soon_removed():
            yield trial
    except CurvedpError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what} of this run cannot be stored in {folder}: "
            f"{type(error).__name__}: {error}",
            "keep tensors and plain values in the states of model and optimiser; or "
            "leave run_dir out, and store what you need by yourself",
        ) from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)
        if made:
            with suppress(OSError):
                folder.rmdir()


def _refuse_arguments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that wants a closure, or anything else, as torch's LBFGS does."""
    own = _own_step(optimizer)
    try:
        if own is None:
            inspect.signature(type(optimizer).step).bind(optimizer)
        else:
            inspect.signature(own).bind()
    except ValueError:  # some that are not written in Python have none
        return
    except TypeError as error:
        raise ConfigurationError(
            f"the optimiser {type(optimizer).__name__} cannot make a private step: its "
            f"step() wants more than gradients ({error})",
            "a closure would look at the data several times, and a step has one "
            "release; choose an optimiser whose step() needs no argument",
        ) from None


def _own_step(optimizer: torch.optim.Optimizer) -> Any:
    """A step that somebody put into this very object; None for that of its class."""
    step = vars(optimizer).get("step")  # schedulers wrap that of the class
    return None if getattr(step, "_wrapped_by_lr_sched", False) else step


def _copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser with one parameter of a shape in each group, and without hooks."""
    if _own_step(optimizer) is not None:
        raise TypeError("its step is bound to the object")
    groups: list[dict[str, Any]] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer.state): state}
    memo[id(optimizer.param_groups)] = groups
    for group in optimizer.param_groups:
        alike: dict[Any, nn.Parameter] = {}
        for p in group["params"]:
            like = (p.shape, p.stride(), p.dtype, p.device, p.requires_grad)
            if like not in alike:
                alike[like] = nn.Parameter(p.detach().clone(), p.requires_grad)
                if p in optimizer.state:
                    memo[id(p)] = alike[like]
                    state[alike[like]] = deepcopy(optimizer.state[p], memo)
            memo[id(p)] = alike[like]
        named = {"params": list(alike.values())}
        settings = {
            k: v for k, v in group.items() if k not in ("params", "param_names")
        }
        groups.append(named | deepcopy(settings, memo))
    kept: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            kept[name] = OrderedDict()
        elif name != "step":
            kept[name] = deepcopy(value, memo)
    # an object only where all of it is a copy: its end may close what it holds
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copied).update(kept)
    return copied


def _steps(copied: torch.optim.Optimizer) -> dict[str, Any]:
    """Two steps on noise, the second with a state; what is stored of it then."""
    trained = [p for g in copied.param_groups for p in g["params"] if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    for group in copied.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.clamp_(*_RATES)
        elif rate is not None and math.isfinite(rate):  # a run may diverge by its rate
            group["lr"] = min(max(rate, _RATES[0]), _RATES[1])
    devices = {p.device for p in trained if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        for seed in range(2):
            few = torch.randn(_FEW, generator=torch.Generator().manual_seed(seed))
            for p in trained:
                many = few.to(p.device, p.dtype).repeat(p.numel() // _FEW + 1)
                p.grad = torch.empty_like(p).copy_(many[: p.numel()].view(p.shape))
            type(copied).step(copied)
    pairs = list(zip(trained, before, strict=True))
    if all(torch.equal(p, old) for p, old in pairs):
        raise _fails(copied, "it moves nothing")
    for p, old in pairs:
        if not torch.isfinite(p).all() and torch.isfinite(old).all():
            raise _fails(copied, "it makes numbers that are not finite")
    return copied.state_dict()


def _fails(optimizer: torch.optim.Optimizer, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the optimiser {type(optimizer).__name__} fails at a step, which was tried on "
        f"copies of its parameters before anything is paid: {why}",
        "choose an optimiser for dense gradients that needs nothing else, or other "
        "settings of this one",
    )
