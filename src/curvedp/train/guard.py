"""What is trained is what was covered: at attach time, and still so at every pass.

Coverage is found once. A model is an ordinary object, and whoever holds it can unfreeze
a layer, exchange one, or wrap it afterwards. A parameter that coverage does not know
gets its gradient from autograd, without clipping and without noise; one that the model
no longer uses only drifts. Neither shows in the loss, so both are looked for here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from curvedp.errors import ConfigurationError, CoverageError, CurvedpError, LoopError
from curvedp.layers.state import State
from curvedp.train.built import Built

__all__ = [
    "Attached",
    "check_optimizer",
    "each_module",
    "refuse_changes",
    "refuse_foreign_gradients",
    "refuse_processes",
    "refuse_rounds",
]

#: Modules of Flower that call a client's handlers.
_OF_A_CLIENT = ("flwr.clientapp.", "flwr.client.", "flwr.compat.client.")

#: By which torchrun, srun, mpirun and Hydra say how many processes they started.
#: SLURM_NTASKS is that of an allocation, which a single process within it has too.
_SIZES = (
    "WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PALS_NRANKS",
    "JSM_NAMESPACE_SIZE",
)
_SAY_SO = "say independent_process=True: their epsilons add up, and ledgers say so"
_AGAIN = "make the change first, then call make_private (with a new optimiser)"


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimiser moves exactly the model's trainable parameters."""
    held = {id(p) for p in _held(optimizer)}
    trainable = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in held]
    if missing:
        raise CoverageError(
            f"the optimiser does not hold {', '.join(map(repr, missing))}: clipping "
            "would spend the budget on what never moves",
            "freeze it (requires_grad_(False)) or give it to the optimiser; build the "
            "optimiser after the model is whole (adapters included)",
        )
    foreign = [
        p for p in _held(optimizer) if id(p) not in trainable and p.requires_grad
    ]
    if foreign:
        raise CoverageError(
            f"the optimiser holds {len(foreign)} trainable parameters that are not in "
            "the model",
            "put them into the model, or give them an optimiser of their own",
        )


def refuse_changes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    covered: Mapping[str, nn.Parameter],
) -> None:
    """Refuse a model or an optimiser that is no longer what was attached."""
    known = {id(p) for p in covered.values()}
    found = set()
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in known:
            _changed(
                f"the parameter {name!r} was added, exchanged or unfrozen after "
                "make_private: its gradient would be neither clipped nor noised"
            )
        found.add(id(p))
    for name, p in covered.items():
        if id(p) not in found:
            _changed(
                f"the parameter {name!r} is no longer in the model: what took its "
                "place would never move"
            )
        if not p.requires_grad:
            _changed(
                f"the parameter {name!r} was frozen after make_private: it would move "
                "nevertheless"
            )
    check_optimizer(model, optimizer)


class Attached:
    """A model and an optimiser, looked at again whenever something is another there.

    Args:
        model: as it was covered.
        optimizer: that moves it.
        covered: its trained parameters by name, which are thereby kept alive: an id
            that was seen before is the same parameter.
        state: all that the model holds besides them.
        end: ends the run, whose weights hold what nobody paid for.

    Attributes:
        state: likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        covered: Mapping[str, nn.Parameter],
        state: State,
        end: Callable[[], None],
    ) -> None:
        self._model, self._optimizer, self._covered = model, optimizer, covered
        self._seen: list[int | bool] = []
        self._parameters: list[nn.Parameter] = []
        self._built, self._unchecked = Built(model), True
        self.state, self._end, self._ended = state, end, False
        state.when_weights_moved = self._close

    def refuse_changes(self) -> None:
        """As :func:`refuse_changes`, at little cost where nothing was changed."""
        if self._unchecked:  # else every module has the parameters that it had
            self._parameters = [
                p
                for module in each_module(self._model)
                for p in module._parameters.values()
                if p is not None
            ]
        seen: list[int | bool] = [p.requires_grad for p in self._parameters]
        for p in _held(self._optimizer):
            seen += (id(p), p.requires_grad)
        if self._unchecked or seen != self._seen:
            refuse_changes(self._model, self._optimizer, self._covered)
            self._seen = seen

    def begin(self, *, runs: bool = True) -> None:
        """Before a private pass: all is as it was checked, and is looked at.

        Args:
            runs: the pass runs the model's Python.

        Raises:
            LoopError: something is another, or the run has ended.
        """
        self.state.give_up()  # a pass that a loop left behind
        if self._ended:
            raise LoopError(
                "the run was closed: a private pass had written to its weights",
                "take the write out of the model, and resume from the last checkpoint "
                "or begin a new run",
            )
        self._open(runs)
        try:
            self.refuse_changes()
            self._built.refuse_changes(closely=self._unchecked)
        except CurvedpError:
            self.state.is_open = False  # no pass is made: nothing is to be put back
            raise
        self._unchecked = False

    def watched(self, *args: Any, **kwargs: Any) -> Any:
        """A pass without a backward pass, alone or in the middle of a recorded one."""
        alone = not self.state.is_open
        if alone:
            self._open()
        with self.unbroken():
            output = self._model(*args, **kwargs)
            self.state.after_forward(args, kwargs)
            if alone:
                self.state.close()
        return output

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Around a part of a pass: if it fails, nothing of it stays."""
        try:
            yield
        except BaseException:
            self.state.give_up()
            raise

    def _open(self, runs: bool = True) -> None:
        # until it is checked, what is another stays so, however often it is looked at
        self._unchecked = self.state.open(runs=runs) or self._unchecked

    def _close(self) -> None:
        self._ended = True
        self._end()

    def refuse_foreign_gradients(self) -> None:
        """See :func:`refuse_foreign_gradients`."""
        refuse_foreign_gradients(self._model, self._optimizer)


def each_module(model: nn.Module) -> Iterator[nn.Module]:
    """A model and all that is in it; what is in it twice comes twice.

    As ``model.modules()``, in a tenth of its time.
    """
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting += module._modules.values()


def refuse_foreign_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Refuse a gradient that nobody clipped and that the optimiser would use.

    Torch's optimisers use whatever is in ``.grad``, of frozen parameters too.
    """
    for p in _held(optimizer):
        if p.grad is not None:
            names = [repr(n) for n, own in model.named_parameters() if own is p]
            raise LoopError(
                f"a gradient reached {names[0] if names else 'a parameter'} past "
                "private.model (a penalty on the weights, a call of the bare model, "
                "a backward pass before make_private); nobody has clipped it",
                "use the optimiser's weight_decay for a penalty, and call "
                "optimizer.zero_grad() before backward",
            )


def refuse_processes(independent: bool = False, otherwise: str = _SAY_SO) -> None:
    """Refuse to be one of several processes that train together.

    Each of them would draw, clip, add noise and keep accounts for itself: as many
    models as processes, all of the same data, and each ledger says what one costs.
    Those that no launcher has started cannot be seen.

    Args:
        independent: the user's word that each is a run of its own.
        otherwise: what to do if it is.
    """
    distributed = torch.distributed
    group = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size() if group else 1
    if size > 1:
        raise ConfigurationError(
            f"torch.distributed is initialised with {size} processes, and private "
            "training over several processes does not exist yet: each would train and "
            "account for a model of its own",
            "train in one process (physical_batch_size bounds the memory that a batch "
            "of any size takes), or call "
            "torch.distributed.destroy_process_group() before",
        )
    launcher = None if independent else _launcher()
    if launcher is not None:
        raise ConfigurationError(
            f"this process is one of several: {launcher} says so. Each would train and "
            "account for a model of its own, on the same data, and what they cost "
            "together would stand nowhere",
            f"start one process; or, if each is a run of its own, {otherwise}",
        )


def _launcher() -> str | None:
    """The variable by which a launcher tells of several processes, with its value."""
    for name in _SIZES:
        size = os.environ.get(name, "").strip().lstrip("0")
        if size.isascii() and size.isdecimal() and size != "1":
            return f"{name}={size[:20]}"
    return None


def refuse_rounds(run_dir: object) -> None:
    """Refuse to begin an account inside the handler of a Flower client's message.

    A handler runs once a round and remembers nothing: each round would print an epsilon
    of its own, and nobody would add them up. A run folder adds them up.
    """
    frame = sys._getframe(1) if run_dir is None else None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_OF_A_CLIENT):
            raise ConfigurationError(
                "this is the message handler of a Flower client, which attaches anew "
                "in each round, and without a run folder each round would have an "
                "account of its own",
                "give run_dir a folder that the client keeps: one ledger then holds "
                "all rounds, and ends at the planned epsilon; or take "
                "curvedp.federated, which is made for rounds",
            )
        frame = frame.f_back


def _held(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _changed(problem: str) -> NoReturn:
    raise LoopError(problem, _AGAIN)
