"""Who makes a private step, and whether it is the step that it should be."""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from curvedp import make_private
from curvedp.layers.bits import any_of

__all__ = [
    "CLIP",
    "CONTESTANTS",
    "NOISE",
    "OURS",
    "OUR_WAYS",
    "OUT_OF_MEMORY",
    "PARTS",
    "PLAIN",
    "RATE",
    "WHITENED",
    "Contestant",
    "Refused",
    "attach",
    "check",
    "clock",
    "is_opacus",
    "is_out_of_memory",
    "opacus_version",
    "private",
    "reason",
    "set_precision",
    "true_float32",
]

CLIP, NOISE, RATE = 1.0, 1.0, 0.01
OURS, PARTS, WHITENED = "curvedp", "curvedp 64", "curvedp dp-kfc"
PLAIN = "non-private"
_MODES = ("hooks", "functorch", "ew", "ghost")
#: Ours, by the words that follow: a number takes a batch in parts of so many rows,
#: "graph" records the step, "kept" keeps in bfloat16 what waits. Norms in float32
#: ("float32") are slower than in float64 on an H200, and are left out.
OUR_WAYS = (
    OURS,
    PARTS,
    WHITENED,
    f"{OURS} graph",
    f"{WHITENED} graph",
    f"{OURS} kept",
    f"{WHITENED} kept",
    f"{OURS} kept graph",
    f"{WHITENED} kept graph",
)
#: A GPU takes a batch as a whole.
CONTESTANTS = {
    "cpu": (
        OURS,
        PARTS,
        WHITENED,
        PLAIN,
        *(f"opacus {mode}" for mode in (*_MODES, "ghost 64")),
    ),
    "cuda": (
        *(way for way in OUR_WAYS if way != PARTS),
        PLAIN,
        *(f"opacus {mode}" for mode in _MODES),
    ),
}
OUT_OF_MEMORY = "out of memory"
#: More than is ever made; a plan with a given noise multiplier computes nothing of it.
_STEPS = 10_000


class Refused(Exception):
    """A library does not take the net, or takes it and computes something else."""


@dataclass
class Contestant:
    """Attached to its model.

    Attributes:
        step: makes one step and says how many seconds it took.
        rest: lets go of what a step leaves behind until the next one begins.
        refresh: estimates curvature anew and says how many seconds it took.
        guard: looks over the model as it does around a pass, likewise.
    """

    step: object
    rest: object = field(default=lambda: None)
    refresh: object = None
    guard: object = None


def is_opacus(name):
    return name.startswith("opacus")


def opacus_version():
    """None where there is none. A carried folder has no metadata to ask."""
    try:
        import opacus
    except ImportError:
        return None
    return opacus.__version__


# -- precision -------------------------------------------------------------------------


def set_precision(precision):
    """For model and autograd, the same for all; curvedp's own sums stay exact."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def true_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    set_precision("float32")
    try:
        yield
    finally:
        set_precision("tf32" if before else "float32")


def _forward_in(precision, device):
    """A context for forward passes and losses."""
    if precision == "bf16":
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return nullcontext


# -- attaching -------------------------------------------------------------------------


def attach(name, model, x, y, precision="float32", **probing):
    """The contestant on a model, with a batch that it takes again and again.

    ``probing`` are settings of dp-kfc.
    """
    forward = _forward_in(precision, x.device)
    if name == PLAIN:
        return _plain(model, x, y, forward)
    if is_opacus(name):
        mode = name.removeprefix("opacus ")
        return _opacus(mode, model, x, y, forward, NOISE, RATE)
    words = name.split()
    rows = min([len(x), *(int(word) for word in words if word.isdigit())])
    # dp-kfc with all its defaults, normalised clipping among them
    whitened = "dp-kfc" in words
    settings = dict(probing) if whitened else {"clipping": "flat"}
    if "float32" in words:
        settings["norm_precision"] = "float32"
    if "graph" in words:
        settings |= {"cuda_graph": True}
        settings |= {} if precision != "bf16" else {"precision": "bf16"}
    if "kept" in words:
        settings["precision"] = "bf16-kept"
    recipe = "dp-kfc" if whitened else "dp-sgd"
    return _ours(model, x, y, forward, rows, recipe, settings)


def private(model, x, y, recipe="dp-sgd", rows=None, **settings):
    """A model attached to a batch that every step draws as a whole."""
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        TensorDataset(x.cpu(), y.cpu()),
        recipe=recipe,
        loss="cross-entropy",
        clip_norm=CLIP,
        noise_multiplier=NOISE,
        sample_rate=1.0,
        steps=_STEPS,
        expected_batch_size=len(x),
        physical_batch_size=rows or len(x),
        allow_large_delta=True,
        **settings,
    )


def _ours(model, x, y, forward, rows, recipe, settings):
    own = private(model, x, y, recipe, rows, **settings)
    batches = iter(own.loader)
    whiteners = own._engine.whiteners

    def step():
        seconds, whole = 0.0, False
        whiteners.at(own.step)  # a refresh that is due is timed apart
        while not whole:
            part, labels = (t.to(x.device) for t in next(batches))
            whole = own.batch_is_whole
            start = clock(x)
            if settings.get("cuda_graph"):
                own.train_on((part, labels))
            else:
                own.optimizer.zero_grad()
                with forward():
                    loss = own.loss(own.model(part), labels)
                loss.backward()
                own.optimizer.step()
            seconds += clock(x) - start
        return seconds

    def refresh():
        whiteners._made_at = None
        start = clock(x)
        whiteners.at(0)
        return clock(x) - start

    def guard():
        attached = own._engine.attached
        start = clock(x)
        attached.begin()
        attached.state.after_forward((), {})
        attached.state.settle(any_of(attached.state.close_later()))
        return clock(x) - start

    estimates = refresh if recipe == "dp-kfc" else None
    return Contestant(step, refresh=estimates, guard=guard)


def _plain(model, x, y, forward):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step():
        start = clock(x)
        optimizer.zero_grad()
        with forward():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return clock(x) - start

    return Contestant(step)


def _opacus(mode, model, x, y, forward, noise, rate):
    from opacus import PrivacyEngine

    mode, *part = mode.split()
    rows = int(part[0]) if part else len(x)
    loader = DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=len(x))
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(),
    )
    private, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def step():
        start = clock(x)
        for first in range(0, len(x), rows):
            if part:  # as BatchMemoryManager does
                optimizer.signal_skip_step(do_skip=first + rows < len(x))
            own = slice(first, first + rows)
            optimizer.zero_grad()
            with forward():
                loss = criterion(private(x[own]), y[own])
            loss.backward()
            optimizer.step()
        return clock(x) - start

    # per-example gradients stay on the parameters until then
    return Contestant(step, rest=optimizer.zero_grad)


def clock(x=None):
    """Seconds: on a GPU when it has caught up; of this process alone if one thread.

    Other work on the machine does not lengthen the time that a process has computed.
    """
    if x is not None and x.is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return (
        time.process_time() if clock_kind("cpu") == "process" else time.perf_counter()
    )


def clock_kind(device):
    """How time is taken, for the result to say."""
    return "process" if device == "cpu" and torch.get_num_threads() == 1 else "wall"


# -- checking --------------------------------------------------------------------------


def check(net, name, device):
    """Refuse a mode that fails, or whose clipped mean is not the true one."""
    if is_opacus(name) and opacus_version() is None:
        raise Refused("there is no Opacus: install it, or put its folder on PYTHONPATH")
    x, y = (t[:4] for t in net.data(device))
    try:
        with true_float32():
            model = net.model(for_opacus=is_opacus(name)).to(device)
            before = copy.deepcopy(model)
            if not is_opacus(name):
                attach(name, model, x, y, probe_size=4, probe_batches=1).step()
                return
            mode = name.removeprefix("opacus ")
            _opacus(mode, model, x, y, nullcontext, 0.0, 1.0).step()
            _compare(before, model, _clipped_mean(before, x, y))
    except Refused:
        raise
    except Exception as error:
        raise Refused(reason(error)) from error


def _compare(before, model, expected):
    pairs = zip(before.named_parameters(), model.parameters(), expected, strict=True)
    for (name, old), new, mean in pairs:
        moved = (old - new).detach()
        if not torch.allclose(moved, mean, rtol=1e-2, atol=1e-5):
            wrong = float((moved - mean).norm() / mean.norm().clamp_min(1e-12))
            raise Refused(
                f"the clipped gradient of {name!r} is wrong by {wrong:.0%} of its norm"
            )


def _clipped_mean(model, x, y):
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradient = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradient]).norm()
        for t, g in zip(total, gradient, strict=True):
            t += g * (CLIP / norm).clamp_max(1.0) / len(x)
    return total


def is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def reason(error):
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {' '.join(text.splitlines()[0].split())[:160]}"
