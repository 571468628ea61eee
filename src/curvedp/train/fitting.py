r"""``physical_batch_size="auto"``: as many rows at once as memory holds.

Two small synthetic passes tell what a row takes and what any pass takes,
``bytes(n) = fixed + n each``, and the largest n follows from the memory that there is.
On a GPU the allocator's peak is measured, and a pass of the size that comes out is
tried. A CPU's allocator has no such record: what autograd saves is counted there, twice
(activations, and their gradients), with the per-example gradients that are kept.

The size is public, and so is all that it is made from: shapes, synthetic values, and
the memory of the machine. One thing would not be: *free* memory is less where the data
lies in it already, so it tells the number of examples. It is looked at only where that
number is public by declaration (``batch_size`` and ``epochs``); with a declared rate a
fixed share of *all* memory is taken. What is sampled and released does not depend on
the size but for rounding, so nothing else follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from curvedp.clipping import ClippingRule, clipped_sum
from curvedp.layers import Coverage, PerExampleLoss, Synthesiser, as_call
from curvedp.layers.coverage import undisturbed
from curvedp.layers.direct import float_tensors
from curvedp.layers.io import DirectIO
from curvedp.plan import Plan
from curvedp.sampling import Views
from curvedp.train.datasets import TrainingData
from curvedp.train.passes import ForwardPrecision
from curvedp.train.settings import even_parts
from curvedp.whitening import IdentityWhitener

__all__ = ["AUTO", "fitting_rows", "largest_fitting", "physical_rows"]

AUTO = "auto"
#: Of free memory; the rest is for libraries, fragments, and the estimate of curvature.
SHARE_OF_FREE = 0.8
#: Of all memory, where free memory must not be looked at.
SHARE_OF_ALL = 0.5
#: More rows gain nothing, whatever the memory.
MOST_ROWS = {"cpu": 1024, "cuda": 16384}
TRIAL_ROWS = 4


def physical_rows(
    source: TrainingData,
    views: Views | None,
    plan: Plan,
    declared: int | str | None,
    model: nn.Module,
    coverage: Coverage,
    synthesise: Synthesiser,
    loss: PerExampleLoss | None,
    precision: ForwardPrecision,
) -> int:
    """Rows of a physical batch: as declared, what fits, or what the device does best.

    The arguments are those of :func:`fitting_rows`, and what tells the data's units.
    """
    expected, slots = plan.sampling.expected_batch_size, source.slots(views)
    if declared == AUTO:
        declared = fitting_rows(
            model,
            coverage,
            synthesise,
            loss,
            plan.clipping,
            expected_rows=expected * slots,
            slots=slots,
            size_is_public=plan.sampling.public_size is not None,
            precision=precision,
        )
    device = next(model.parameters()).device.type
    held = coverage.activation_bytes
    return source.physical_size(expected, declared, held, device, views)


def fitting_rows(
    model: nn.Module,
    coverage: Coverage,
    synthesise: Synthesiser,
    loss: PerExampleLoss | None,
    rule: ClippingRule,
    *,
    expected_rows: float,
    slots: int = 1,
    size_is_public: bool,
    precision: ForwardPrecision | None = None,
) -> int:
    """Rows of a physical batch: what a step mostly draws, in as few parts as fit.

    Args:
        model: on its device; it is left as it was.
        coverage: its verified sites.
        synthesise: makes synthetic batches of its shapes.
        loss: per-example loss, or None for that of the user's loop.
        rule: how gradients are clipped.
        expected_rows: rows that a step draws on average.
        slots: rows of one unit, which stay together.
        size_is_public: whether free memory may be looked at; see the module.
        precision: what a pass keeps; a forward pass in less is not tried.
    """
    device = next(model.parameters()).device
    precision = precision or ForwardPrecision(None, model)
    trial = _Trial(model, coverage, synthesise, loss, rule, slots, precision)
    memory = available_bytes(device, free=size_is_public)
    most = MOST_ROWS.get(device.type, MOST_ROWS["cpu"])
    units = max(1, min(most, trial.longest(memory)) // slots)
    rows = slots * units
    if device.type == "cuda":
        rows = slots * largest_fitting(lambda n: trial.fits(slots * n), units)
    return max(slots, min(rows, even_parts(expected_rows, rows)))


def available_bytes(device: torch.device, *, free: bool) -> float:
    """Memory that a pass may take on a device."""
    if device.type == "cuda":
        unused, whole = torch.cuda.mem_get_info(device)
        # what torch has set aside and does not use is free for it as well
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return SHARE_OF_FREE * (unused + held) if free else SHARE_OF_ALL * whole
    known = _meminfo()
    if not known:  # no such file: a small machine is assumed
        return 2.0**31
    name = "MemAvailable" if free else "MemTotal"
    return (SHARE_OF_FREE if free else SHARE_OF_ALL) * known[name]


def _meminfo() -> dict[str, int]:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            pairs = (line.split(":") for line in lines)
            return {name: 1024 * int(rest.split()[0]) for name, rest in pairs}
    except OSError:
        return {}


def largest_fitting(fits: Callable[[int], bool], guess: int) -> int:
    """The guess, or the largest of its halves that fits; 1 if none does."""
    while guess > 1 and not fits(guess):
        guess //= 2
    return guess


class _Trial:
    """Passes over synthetic rows as the engine makes them."""

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        synthesise: Synthesiser,
        loss: PerExampleLoss | None,
        rule: ClippingRule,
        slots: int,
        precision: ForwardPrecision,
    ) -> None:
        self._model = model
        self._coverage = coverage
        self._synthesise = synthesise
        self._loss = loss
        self._rule = rule.at(rule.first_threshold())
        self._slots = slots
        self._precision = precision
        # what few rows take has to tell what many will take
        self._as_large = precision.as_of_large_passes()
        self._device = next(model.parameters()).device
        named = dict(model.named_parameters())
        self._parameters = {n: named[n] for n in coverage.parameters}

    def longest(self, memory: float) -> int:
        """Rows that a line through two passes says the memory holds."""
        first = TRIAL_ROWS * self._slots
        small, large = self._bytes(first), self._bytes(2 * first)
        each = max(1.0, (large - small) / first)
        fixed = max(0.0, small - each * first)
        return max(1, math.floor((memory - fixed) / each))

    def fits(self, rows: int) -> bool:
        """Whether a pass of so many rows goes through."""
        try:
            self._pass(rows, self._precision)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        return True

    def _bytes(self, rows: int) -> float:
        if self._device.type != "cuda":
            written = self._pass(rows, self._as_large)
            sums = sum(p.numel() * p.element_size() for p in self._parameters.values())
            return 2.0 * (rows * self._coverage.activation_bytes + written + sums)
        # libraries take memory of their own at first use
        self._pass(rows, self._as_large)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._pass(rows, self._as_large)
        return float(torch.cuda.max_memory_allocated(self._device) - before)

    def _pass(self, rows: int, precision: ForwardPrecision) -> int:
        """Forward, backward, clip; bytes of the gradients that were written down."""
        generator = torch.Generator().manual_seed(0)
        with undisturbed(self._model):
            batch = self._synthesise(rows, generator)
            sites = self._rule.measured_sites
            recording = precision.recording(self._model, self._coverage, rows, sites)
            output = recording.forward(*as_call(batch.inputs))
            torch.autograd.backward(self._total(output, batch.targets))
            ios = recording.layer_ios()
            clipped_sum(
                ios,
                self._rule,
                IdentityWhitener(),
                parameters=self._parameters,
                present=torch.ones(rows, dtype=torch.bool),
                step=0,
                slots=self._slots,
            )
        written = [g for io in ios for g in _written(io)]
        return sum(g.numel() * g.element_size() for g in written)

    def _total(self, output: object, targets: object) -> Tensor:
        if self._loss is not None:
            return self._loss(output, targets).mean()
        floats = [t.float().sum() for t in float_tensors(output) if t.requires_grad]
        return torch.stack(floats).sum()


def _written(io: object) -> list[Tensor]:
    if isinstance(io, DirectIO):
        return list(io.grads.values())
    return [g for part in getattr(io, "parts", ()) for g in _written(part)]
