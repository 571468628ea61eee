r"""Does the run tie examples together? Looked for where the run is.

The check of :mod:`curvedp.layers.verify` takes three rows, in float64 where it can. A
layer may mix examples only from eight rows on, in float32 alone, or in its backward
pass. So the run's own pass is made on synthetic rows: with its physical batch size,
precision, device and mode. Half of the rows get other contents, by the bits of their
numbers (:mod:`curvedp.layers.perturb`), and what is clipped of the *other* half (``a``
and ``d``, so error signals as well as outputs) has to stay what it was. These are
``2 ceil(log2 B)`` passes, from the same buffers and the same random state as the pass
that they are compared with. A model that draws is seen from another state for each bit,
and eight rows of it from :data:`MANY_STATES`, for what is mixed in some passes only.

In two more passes half of the rows are not finite: what is multiplied with 0 (a mask, a
one-hot matrix) lets NaN through, and nothing else.

Two equal passes come first. A model in which they differ has randomness or state of its
own, under which coupling would hide, and is refused.

Up to rounding, that is. The same operations compute the same rows in all of these
passes, so mostly not a bit differs. Where rows are packed, or a GPU adds up in any
order, an example's contribution may be apart by :data:`ROUNDED` units of rounding of
the coarsest dtype that the run computes in. How far the sum may move by that, at most,
is measured, and stands in the statement.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from curvedp.errors import ConfigurationError, CouplingError, CurvedpError
from curvedp.layers import Batch, Coverage, PerExampleLoss, Synthesiser
from curvedp.layers.compare import traced
from curvedp.layers.coverage import undisturbed
from curvedp.layers.direct import float_tensors
from curvedp.layers.generators import Generators
from curvedp.layers.perturb import KINDS, PLAIN, bits, replaced, varied

from curvedp.layers.perturb import taken_on_cpu, without_finite  # isort: skip
from curvedp.layers.sketch import (
    LayerSketch,
    RowSketch,
    Sketcher,
    moved,
    relative_change,
)
from curvedp.layers.state import State
from curvedp.layers.verify import perturbed_parameters
from curvedp.train.passes import ForwardPrecision, RecordedPass

__all__ = ["MOST_ROWS", "CouplingCheck"]

_log = logging.getLogger(__name__)

#: Physical batches that are larger are checked with as many rows.
MOST_ROWS = 4096

#: How far an example's contribution may be from that of another pass, in C, by dtype in
#: units of ``eps``. A product over other shapes was seen to be 400 apart in float32.
ROUNDED = {torch.float64: 2.0**20, torch.float32: 2.0**9}
ROUNDED_SHORT = 4.0
#: The coarsest that anything is computed in: bfloat16. What is kept shorter is not.
EPS_OF_SHORT = 2.0**-7

#: Random states that passes of few rows begin with where passes draw, for what is mixed
#: in some passes only: once in 20 is missed once in 26 times.
MANY_STATES, FEW_ROWS = 64, 8

#: Seconds that the passes may take without a word.
PATIENCE = 5.0


@dataclass(frozen=True, repr=False)
class _Passed:
    """What a pass left, row by row."""

    outputs: list[RowSketch]
    losses: RowSketch
    layers: Mapping[str, LayerSketch]


class CouplingCheck:
    """The check of one model at the size of its run, once for each mode it runs in.

    Args:
        model: on its device.
        coverage: its verified sites.
        synthesise: makes synthetic batches.
        loss: per-example loss; None for that of the user's loop, which is not checked.
        precision: of the forward pass.
        rows: of every physical batch.
        keep_inputs: sites whose inputs the run asks for.
        made_up: whether inputs are any numbers, which may be scaled as well.

    Attributes:
        rows: that the check takes.
        effect: how far the sum moved by rounding, at most, in C.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        synthesise: Synthesiser,
        loss: PerExampleLoss | None,
        precision: ForwardPrecision,
        rows: int,
        *,
        keep_inputs: Collection[str] = (),
        made_up: bool = True,
    ) -> None:
        self.rows = min(rows, MOST_ROWS)
        self.effect = 0.0
        self._physical = rows
        self._coverage = coverage
        self._model = model
        self._synthesise = synthesise
        self._loss = loss
        self._keep_inputs = keep_inputs
        self._kinds = KINDS if made_up else PLAIN
        self._precision = precision
        self._device = next(model.parameters()).device
        self._modules = list(model.modules())  # looking for them takes longer
        self._modes: set[Hashable] = set()
        self._seen: list[Any] = []
        self._pass = RecordedPass(
            model, coverage, self._watched, rows=self.rows, precision=precision
        )

    def attached(self) -> CouplingCheck:
        """Itself, when the model was checked in training mode."""
        with undisturbed(self._model) as state:
            self._check(state)
            self._modes.add(self._flags())
        return self

    def require_mode(self) -> None:
        """Check it in the mode that it is in, if that was not done yet."""
        flags = self._flags()
        if flags not in self._modes:
            with undisturbed(self._model, train=False) as state:
                self._check(state)
            self._modes.add(flags)

    def limits(self) -> list[str]:
        """What the check leaves open, for the statement."""
        found = [
            "examples that only their real values tie together: coupling was looked "
            f"for on synthetic rows, {self.rows} at a time"
            + (f" (portions have {self._physical})" * (self._physical > self.rows))
        ]
        if self.effect > 0:
            found.append(
                "rounding that depends on other rows of a portion: it moved the sum of "
                f"synthetic ones by at most {self.effect:.1g} of the bound"
            )
        return found

    def _flags(self) -> Hashable:
        kind = self._device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return cast, *[module.training for module in self._modules]

    def _check(self, state: State) -> None:
        if self.rows < 2:
            return
        self._allowed = self._rounding()
        self._sketcher = Sketcher(self.rows, self._device)
        self._point = perturbed_parameters(self._model, seed=0)
        self._generators = Generators(self._model, self._device)
        self._state, self._draws = state, False
        try:
            with torch.enable_grad():
                batch, references = self._begun()
                self._compare(batch, references)
                self._try_without_finite(batch, references[0])
                if self._draws:
                    self._few()._try_states()
        finally:  # as many bytes as the model has
            del self._sketcher, self._point, self._generators, self._state

    def _rounding(self) -> float:
        """Distance that counts as rounding, in C."""
        dtypes = {p.dtype for p in self._model.parameters()} | self._precision.dtypes()
        if torch.is_autocast_enabled(self._device.type):  # around the user's loop
            dtypes.add(torch.get_autocast_dtype(self._device.type))
        return max(
            ROUNDED.get(d, ROUNDED_SHORT) * min(torch.finfo(d).eps, EPS_OF_SHORT)
            for d in dtypes
            if d.is_floating_point
        )

    def _begun(self) -> tuple[Batch, dict[int, _Passed]]:
        """Rows of which all has a finite gradient, if possible; passes over them."""
        found: tuple[Batch, dict[int, _Passed]]
        drawn = self._synthesise(self.rows, torch.Generator().manual_seed(0))
        for kinds in dict.fromkeys((self._kinds, PLAIN)):
            self._kinds = kinds
            batch = varied(drawn, kinds)
            try:
                first = self._passed(batch, 0)
            except (ValueError, RuntimeError, IndexError, AssertionError):
                if kinds == PLAIN:
                    raise
                continue  # inputs of this model are not any numbers
            found = batch, {0: first}
            if bool(_finite(first).all()):
                break
        if not bool(_finite(first).any()):
            raise CouplingError(
                f"no gradient of {self.rows} synthetic rows is finite, so nothing can "
                "be said about them",
                "give make_private synthetic= batches that the model can be run on",
            )
        batch, references = found
        self._refuse_different(batch, first, self._passed(batch, 0))
        return batch, references

    def _compare(self, batch: Batch, references: dict[int, _Passed]) -> None:
        began, patience = time.monotonic(), PATIENCE
        every = replaced(batch, self._synthesise, self._kinds)
        for number, (rows, mixed) in enumerate(every):
            state = number // 2 * self._draws
            if state not in references:
                references[state] = self._passed(batch, state)
                _finite(references[state])  # its tensors need not wait
            passed = self._passed(mixed, state, rows)
            if self._apart(references[state], passed, ~rows):
                self._refuse_coupled(batch, mixed, rows, state)
            taken = time.monotonic() - began
            if taken > patience:
                patience = taken + 3 * PATIENCE
                _log.warning(
                    "looking for coupling on %d synthetic rows: pass %d of %d, %.0f s",
                    *(self.rows, number + 1, 2 * bits(self.rows), taken),
                )

    def _try_without_finite(self, batch: Batch, reference: _Passed) -> None:
        """Refuse a model in which a row that is not finite reaches others."""
        for rows, mixed in without_finite(batch):
            gpu = self._device.type != "cpu"  # on which an assertion ends it all
            if gpu and not taken_on_cpu(self._model, self._loss, mixed):
                continue
            try:
                passed = self._passed(mixed, 0, rows)
            except CurvedpError:
                raise
            except Exception:  # its own assertion: it says no to such rows
                continue
            if self._apart(reference, passed, ~rows):
                run, strange = partial(self._passed, batch, 0), (mixed, 0, rows)
                where = self._first(run, partial(self._passed, *strange), ~rows)
                raise CouplingError(
                    "a row that is not finite reaches others through "
                    f"{where or 'the loss, or the backward pass'}: one with NaN or "
                    f"infinity changes what is clipped of another one, with "
                    f"{self.rows} rows",
                    "begin forward with torch.nan_to_num(x, 0, 0, 0).clamp(-1e4, 1e4), "
                    "or index rows instead of multiplying them with 0; ask of no "
                    "batch whether all of it is finite",
                )

    def _few(self) -> CouplingCheck:
        """The same check with few rows."""
        few = copy.copy(self)
        few.rows = min(self.rows, FEW_ROWS)
        few._sketcher = Sketcher(few.rows, self._device)
        few._pass = RecordedPass(
            *(self._model, self._coverage, few._watched),
            rows=few.rows,
            precision=self._precision,
        )
        return few

    def _try_states(self) -> None:
        """Refuse a model that mixes rows from some random states."""
        drawn = self._synthesise(self.rows, torch.Generator().manual_seed(0))
        batch = varied(drawn, self._kinds)
        changes = list(replaced(batch, self._synthesise, self._kinds))
        for state in range(MANY_STATES):
            rows, mixed = changes[state % len(changes)]
            before = self._passed(batch, state)
            if self._apart(before, self._passed(mixed, state, rows), ~rows):
                self._refuse_coupled(batch, mixed, rows, state)

    def _passed(
        self, batch: Batch, state: int, changed: Tensor | None = None
    ) -> _Passed:
        """A pass, from the same state as every other with this number."""
        self._changed = changed
        self._put_back()  # making up a batch may run the model
        self._generators.seed(state)
        try:
            ios, _ = self._pass(
                batch.inputs,
                batch.targets,
                point=self._point,
                keep_inputs=self._keep_inputs,
            )
            self._draws = self._draws or self._generators.drawn()
        finally:
            self._put_back()
        outputs, losses = self._seen
        layers = {io.name: self._sketcher.layer(io) for io in ios}
        return _Passed(outputs, losses, layers)

    def _put_back(self) -> None:
        self._state.rewind()
        self._generators.put_back()

    def _watched(self, output: Any, targets: Any) -> Tensor:
        """Losses of the examples; they and the outputs are noted."""
        losses = (
            self._projected(output)
            if self._loss is None
            else self._loss(output, targets)
        )
        if losses.shape != (self.rows,):
            raise ConfigurationError(
                f"the loss returned {tuple(losses.shape)} for {self.rows} examples",
                "return one loss per example, shape [batch]",
            )
        found = self._sketcher.tensors(float_tensors(output))
        self._seen = [found, self._sketcher.tensors([losses])[0]]
        return losses

    def _projected(self, output: Any) -> Tensor:
        """Random combinations of the outputs, which change with their example."""
        total = torch.zeros(self.rows, device=self._device)
        for t in float_tensors(output):
            if t.dim() == 0 or len(t) != self.rows:
                raise CouplingError(
                    f"the model returned a tensor of shape {tuple(t.shape)} for "
                    f"{self.rows} rows: its first dimension is not the batch",
                    "return outputs with examples at dimension 0",
                )
            first, second = (
                torch.randn(t.shape, generator=torch.Generator().manual_seed(seed))
                for seed in (2, 3)
            )
            if self._changed is not None:
                rows = self._changed.reshape(-1, *([1] * (t.dim() - 1)))
                first = torch.where(rows, second, first)
            total = total + (t * first.to(t)).reshape(self.rows, -1).sum(1)
        return total

    def _apart(self, before: _Passed, after: _Passed, rows: Tensor) -> bool:
        """Whether these rows differ by more than rounding; notes what rounding did."""
        if self._differ(
            [*before.outputs, before.losses], [*after.outputs, after.losses], rows
        ):
            return True
        shares = moved(before.layers, after.layers, rows)
        if not shares:
            return False
        by_row = torch.stack(list(shares.values())).square().sum(0).sqrt()
        self.effect = max(self.effect, float(by_row.sum()))
        return bool((by_row > self._allowed).any())

    def _differ(
        self, before: list[RowSketch], after: list[RowSketch], rows: Tensor
    ) -> bool:
        if len(before) != len(after):
            return True
        for x, y in zip(before, after, strict=True):
            change = relative_change(x, y, rows, to_mean=True)
            if change is not None and bool((change > self._allowed).any()):
                return True
        return False

    def _refuse_different(self, batch: Batch, one: _Passed, same: _Passed) -> None:
        everywhere = torch.ones(self.rows, dtype=torch.bool)
        if not self._apart(one, same, everywhere):
            return
        run = partial(self._passed, batch, 0)
        where = self._first(run, run, everywhere)
        raise CouplingError(
            f"two equal passes over the same {self.rows} rows differ "
            f"({where or 'in the backward pass'}): the model has randomness or state "
            "of its own, under which coupling of examples would hide",
            "draw from torch's global generator, or from a torch, numpy or Python "
            "generator that a module holds as an attribute; keep nothing from pass to "
            "pass",
        )

    def _refuse_coupled(
        self, batch: Batch, mixed: Batch, rows: Tensor, state: int
    ) -> NoReturn:
        kept = ~rows
        before, after = self._passed(batch, state), self._passed(mixed, state, rows)
        if self._differ(before.outputs, after.outputs, kept):
            where = self._first(
                partial(self._passed, batch, state),
                partial(self._passed, mixed, state, rows),
                kept,
            )
            raise CouplingError(
                "the output for one example changes when another example of the batch "
                f"changes, with {self.rows} rows "
                f"({where or 'in the model itself'})",
                "replace the layer that mixes examples (BatchNorm by GroupNorm, batch "
                "statistics by per-example ones, a limit over the batch by none)",
            )
        if self._differ([before.losses], [after.losses], kept):
            raise CouplingError(
                "the loss of one example changes when another example of the batch "
                f"changes, with {self.rows} rows: the loss couples examples",
                "return each example's own loss; do not divide by a count or a sum "
                "over the batch (tokens, weights, positives)",
            )
        shares = moved(before.layers, after.layers, kept)
        largest = {name: float(share.max()) for name, share in shares.items()}
        seen = [name for name, far in largest.items() if far > self._allowed]
        raise CouplingError(
            "the gradient for one example changes in the backward pass when another "
            f"example of the batch changes, with {self.rows} rows (seen in "
            f"{', '.join(map(repr, seen or largest))})",
            "find what couples the examples behind that layer (a custom autograd "
            "function, a hook on a tensor, a shared normaliser)",
        )

    def _first(
        self, one: Callable[[], Any], another: Callable[[], Any], rows: Tensor
    ) -> str | None:
        """The first module whose outputs differ in these rows."""

        def keep(output: Any) -> list[RowSketch]:
            return self._sketcher.tensors(float_tensors(output))

        before, after = (traced(self._model, run, keep)[1] for run in (one, another))
        for (name, x), (_, y) in zip(before, after, strict=False):
            if self._differ(x, y, rows):
                return f"first seen at layer {name!r}" if name else None
        return None


def _finite(passed: _Passed) -> Tensor:
    """Rows whose gradients are finite."""
    squares = [layer.lengths()[1] for layer in passed.layers.values()]
    return torch.stack(squares).isfinite().all(0)
