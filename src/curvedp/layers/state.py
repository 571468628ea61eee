"""Nothing that a private pass leaves in the model gets past the noise.

Whoever stores a model, or pickles it, takes along what its forward and backward passes
have written: buffers, frozen parameters, attributes, whatever ``get_extra_state``
gives. Only released parameters may carry what is private. So a :class:`State` looks at
everything that the model holds (:mod:`curvedp.layers.held`) before a private pass and
after it, and what is another then was

- *written anew by every forward pass* (a KL term, an attention map). Such places are
  found when the model is attached (:mod:`curvedp.layers.anew`). The loss may use what
  stands there, and after the backward pass it is gone: what stood there before the
  pass is back;
- *a cache or a counter* (the vectors of a spectral norm, a table of rotations, a
  mask). A pass over synthetic rows, begun with the same state and the same random
  numbers, leaves the same bits. In the first portion of a step what the synthetic pass
  leaves stays, also where the private pass left nothing: that it did not count is a
  bit about its rows. In later portions what stood there before comes back, so nothing
  tells how many portions a step had;
- anything else. It is put back, then the pass is refused.

Weights are part of it: they are compared over the whole pass, the backward pass
included, and between passes they are the user's (a moving average, merged adapters).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from curvedp.layers.bits import (
    Flag,
    RandomState,
    random_numbers,
    random_state,
)
from curvedp.layers.functional import call_with
from curvedp.layers.held import Place
from curvedp.layers.snapshot import (
    Kept,
    Snapshot,
    Spot,
    Spots,
    carries,
    said,
    weights_moved,
)
from curvedp.layers.synthetic import Synthesiser, rows_of, synthetic_like

__all__ = ["FEW", "Place", "Spot", "Spots", "State", "carries"]

#: Rows of the first synthetic pass that may explain a change; then all of them.
FEW = 2


class State(Snapshot):
    """What a model holds, over one pass at a time.

    Args:
        model: the user's.
        anew: places that every forward pass writes anew.
        synthesise: makes rows of the model's shapes, to explain caches and counters;
            without it none is explained.
        kept: finds weights that were too large to be copied.

    Attributes:
        anew: likewise.
        is_open: whether a pass has begun and is not over.
        when_weights_moved: called before the error that says so.
    """

    def __init__(
        self,
        model: nn.Module,
        anew: Iterable[Place] = (),
        synthesise: Synthesiser | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(model, anew, kept)
        self._synthesise = synthesise
        self.when_weights_moved: Callable[[], None] = lambda: None
        self.is_open = False
        self._random: RandomState | None = None
        self._looked_within = False  # a pass; what it left has not been told of
        self._advanced = False  # in this step, as a synthetic pass does
        self._still = False  # the last synthetic pass of a step moved nothing
        self._due: dict[Spot, Hashable] = {}  # explained, and goes with the pass

    # -- around a pass ----------------------------------------------------------------

    def open(self, *, weights: bool = True, runs: bool = True) -> bool:
        """Look at everything; True if it is not what was there at the last time.

        Args:
            weights: look at what they hold too.
            runs: the pass runs the model's Python, and may leave a cache or a counter.
        """
        scanned = (
            self._scan is None
            or not self._scan.same()
            or self._moved_memory()
            or not all(leaf.same() for leaf in self._scan.leaves)
        )
        if scanned:
            self._look()
        if weights:
            self._weights.hold()
        self._others.hold()
        self._said = [(m, w, said(m)) for m, w in self._found.speaking]
        self._random = random_state(self._devices) if runs else None
        self.is_open = True
        self._due = {}
        scanned, self._looked_within = scanned or self._looked_within, False
        self._still = self._still and not scanned
        return scanned

    def end_step(self) -> None:
        """After a step: caches and counters may move once in the next one."""
        self._advanced = False

    def rewind(self) -> None:
        """Put back what was there at the last look, but for weights and hooks."""
        self.restore(weights=False, hooks=False)

    def after_forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        point: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Refuse what the forward pass left, unless it may stay or will go.

        In the first pass of a step caches and counters move, whatever it left.

        Args:
            args: of the pass; what is synthetic has their shapes.
            kwargs: likewise.
            point: the weights that it was made with, if not the model's own.

        Raises:
            CouplingError: with everything put back before.
        """
        moves = not (self._advanced or self._still) and self._random is not None
        moves = moves and self._synthesise is not None
        if not moves and not self._foreign(self.spots(weights=False)):
            return  # what the weights hold is looked at when the pass is over
        left = self._foreign(self.spots())
        if any(spot[0] in ("weights", "_parameters") for spot in left):
            self.refuse(left)
        bits = {spot: self.bits(spot) for spot in left}
        kept = self.kept_anew()
        self.restore(weights=False)
        if not self._explained(bits, args, kwargs, point or {}) and left:
            self.refuse(left)
        if self._advanced:  # the backward pass may use what stands there
            self._due = bits
            self._restore_anew()
            kept()
            return
        moved = self._foreign(self.spots())
        self._advanced, self._still = True, not moved
        self._restore_anew()
        if moved:
            weights = self._weights, self._own
            self._look()
            self._looked_within = True
            self._weights, self._own = weights  # as they were before the pass
            self._others.hold()
            self._said = [(m, w, said(m)) for m, w in self._found.speaking]
        kept()

    def close_later(self, *, quietly: bool = False, ran: bool = True) -> list[Flag]:
        """As ``close``, but nobody waits for what a GPU says of its memory.

        Args:
            quietly: as of ``close``.
            ran: Python ran in the pass; else memory alone can be another.

        Returns:
            Flags of what was written to, for :meth:`settle`, which is due next.
        """
        if not self.is_open:
            return []
        if self._due:
            self.close(quietly=quietly)
            return []
        others, weights = self._others.differences(), self._weights.differences()
        flags = [*others, *weights]
        written = any(flag is True for flag in flags)
        if written or (ran and self.spots(contents=False)):
            self.close(quietly=quietly)
            return []
        return flags

    def settle(self, written: bool) -> None:
        """End a pass, and refuse it if a flag of :meth:`close_later` is set."""
        if written:
            self.close(quietly=True)  # the rest was looked at
        self.is_open = False

    def close(self, *, quietly: bool = False) -> None:
        """After the backward pass: put back what was written anew, refuse the rest.

        Args:
            quietly: put back what is no tensor's memory and raise nothing about it:
                for passes whose Python runs only when they are recorded.

        Raises:
            CouplingError: with everything put back before.
        """
        if not self.is_open:
            return
        self.is_open = False
        self._leave_modes()
        spots = self.spots(printed=True)
        left = {
            spot: where
            for spot, where in self._foreign(spots).items()
            if spot not in self._due or self.bits(spot) != self._due[spot]
        }
        hard = {s: w for s, w in left.items() if s[0] in ("weights", "others", "said")}
        if hard or (left and not quietly):
            self.refuse(hard or left)
        if spots:
            self.restore(weights=False)

    def give_up(self) -> None:
        """After a pass that failed, or whose end will not come: put everything back."""
        if not self.is_open:
            return
        self.is_open = False
        self._leave_modes()
        moved = bool(self._weights.changed())
        self.restore(weights=True)
        if moved:
            self.when_weights_moved()

    def _leave_modes(self) -> None:
        """After the forward pass, which mode a module is in is the user's to say."""
        for node in self._found.nodes:
            if node.where[1] is None and not node.register:
                node.accept("training")

    def require_closed(self) -> None:
        """Refuse what a pass that is not over has left, before something is stored.

        Raises:
            CouplingError: with everything put back before.
        """
        if self.is_open and (left := self._foreign(self.spots(printed=True))):
            self.refuse(left)

    def refuse(self, left: Spots) -> NoReturn:
        """Put everything back, then say what it was."""
        self.is_open = False
        moved = [self._own[k] for k in self._weights.changed()]
        lost = self.restore(weights=True)
        if moved:
            self.when_weights_moved()
            raise weights_moved(moved, lost)
        raise carries(next(iter(left.values())))

    def kept_anew(self) -> Callable[[], None]:
        """Takes what the pass wrote anew; puts it there again when it is called."""
        nodes = [(n, n.content()) for n in self._found.other() if n.where in self.anew]
        attributes = [
            (node.container, key, node.container[key])
            for node in self._found.other()
            if node.where[1] is None
            for key in node.changed_keys()
            if (node.where[0], str(key)) in self.anew and key in node.container
        ]

        def put() -> None:
            for node, (keys, values) in nodes:
                node.fill(keys, values)
            for own, key, value in attributes:
                own[key] = value

        return put

    def _restore_anew(self) -> None:
        """Put back what is written anew, and leave the rest as it is."""
        for node in self._found.other():
            if node.where in self.anew:
                node.restore()
            elif node.where[1] is None:
                for key in node.changed_keys():
                    if (node.where[0], str(key)) in self.anew:
                        node.restore_key(key)

    # -- caches and counters ----------------------------------------------------------

    def _explained(
        self,
        bits: dict[Spot, Hashable],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        point: Mapping[str, Tensor],
    ) -> bool:
        """Whether a synthetic pass from the same state leaves the same bits.

        What stays must not depend on what the private pass left: of the first pass of
        a step it is that of as many rows, and it may be more.
        """
        if self._synthesise is None or self._random is None:
            return False
        full = rows_of((args, kwargs))
        for rows in dict.fromkeys((FEW, full) if self._advanced else (full,)):
            given = synthetic_like(self._model, self._synthesise, (args, kwargs), rows)
            self.restore(weights=False)  # to make them may take a pass
            if given is None:
                return False
            with random_numbers(self._model, self._random), torch.no_grad():
                try:
                    call_with(self._model, point, *given)
                except Exception:  # the model's own: such rows explain nothing
                    self.restore(weights=False)
                    continue
            left = self._foreign(self.spots())
            more = left.keys() - bits.keys()
            if (not more or not self._advanced) and all(
                spot in left and self.bits(spot) == bits[spot] for spot in bits
            ):
                return True
            self.restore(weights=False)
        return False
