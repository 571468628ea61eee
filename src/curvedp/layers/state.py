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

import copy
import pickle
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from curvedp.errors import CouplingError, CurvedpError
from curvedp.layers.bits import (
    Flag,
    RandomState,
    bits_of,
    random_numbers,
    random_state,
)
from curvedp.layers.contents import Contents
from curvedp.layers.functional import call_with
from curvedp.layers.held import Place, Scan, missing, scan
from curvedp.layers.synthetic import Synthesiser, rows_of, synthetic_like

__all__ = ["FEW", "Place", "Spot", "Spots", "State", "carries"]

#: Rows of the first synthetic pass that may explain a change; then all of them.
FEW = 2

#: Gives a weight from before that is not held in memory, by name; None without it.
Kept = Callable[[str], Tensor | None]

#: Something that is another than it was: its kind, which of them, and perhaps a key.
Spot = tuple[Hashable, ...]
Spots = dict[Spot, Place]


class State:
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
        self._model = model
        self.anew = frozenset(anew)
        self._synthesise = synthesise
        self._kept = kept
        self.when_weights_moved: Callable[[], None] = lambda: None
        self.is_open = False
        self._scan: Scan | None = None
        self._weights = self._others = Contents([])
        self._own: list[Place] = []
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
        self._said = [(m, w, _said(m)) for m, w in self._found.speaking]
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
            self._said = [(m, w, _said(m)) for m, w in self._found.speaking]
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
            raise _weights_moved(moved, lost)
        raise carries(next(iter(left.values())))

    # -- what is another --------------------------------------------------------------

    @property
    def _found(self) -> Scan:
        assert self._scan is not None
        return self._scan

    @torch.inference_mode(False)  # it is used outside of one too
    def _look(self) -> None:
        self._scan = found = scan(self._model)
        parameters = {id(p) for p in self._model.parameters()}
        tensors = found.tensors
        self._tensors = [(t, w, t.detach()) for t, w in tensors]
        self._where = [t.data_ptr() for t, _ in tensors], [t.shape for t, _ in tensors]
        self._own = [w for t, w in tensors if id(t) in parameters]
        self._rest = [w for t, w in tensors if id(t) not in parameters]
        self._weights = Contents([t for t, _ in tensors if id(t) in parameters])
        self._others = Contents([t for t, _ in tensors if id(t) not in parameters])
        self._devices = {p.device for p in self._model.parameters()}

    def _moved_memory(self) -> bool:
        tensors = self._found.tensors
        return self._where != (
            [t.data_ptr() for t, _ in tensors],
            [t.shape for t, _ in tensors],
        )

    def spots(
        self, *, printed: bool = False, weights: bool = True, contents: bool = True
    ) -> Spots:
        """What is another than it was, and its place. Empty in nearly every pass.

        Args:
            printed: look at weights too that are too large to be copied.
            weights: look at what weights hold.
            contents: look at what any tensor holds.
        """
        found = self._containers()
        if self._moved_memory():
            for k, (t, where, then) in enumerate(self._tensors):
                if t.data_ptr() != then.data_ptr() or t.shape != then.shape:
                    own = isinstance(t, nn.Parameter)
                    found["_parameters" if own else "tensor", k] = where
        for k in self._others.changed() if contents else ():
            found["others", k] = self._rest[k]
        for k, leaf in enumerate(self._found.leaves):
            if not leaf.same():
                found["leaf", k] = leaf.where
        for k, (module, where, then) in enumerate(self._said):
            if bits_of(_said(module)) != bits_of(then):
                found["said", k] = (where[0], "get_extra_state")
        if weights and contents:
            for k in self._weights.changed(printed=printed):
                found["weights", k] = self._own[k]
        return found

    def _containers(self) -> Spots:
        found: Spots = {}
        for node in [] if self._found.same() else self._found.other():
            if node.where[1] is not None:
                found["node", id(node.container)] = node.where
                continue
            kind = node.register or "key"
            for key in node.changed_keys():
                found[kind, id(node.container), key] = node.where[0], str(key)
        return found

    def _foreign(self, spots: Spots) -> Spots:
        """Without what every pass writes anew."""
        soft = ("key", "node")
        return {
            spot: where
            for spot, where in spots.items()
            if where not in self.anew or spot[0] not in soft
        }

    def bits(self, spot: Spot) -> Hashable:
        """What tells what stands there now from everything else."""
        kind, number = spot[0], spot[1]
        assert isinstance(number, int)
        nodes = [n for n in self._found.other() if id(n.container) == number]
        if kind == "node":
            return bits_of(nodes[0].container)
        if len(spot) > 2:
            return bits_of(nodes[0].container.get(spot[2], missing))
        if kind == "others":
            return bits_of(self._others.words[number])
        if kind in ("tensor", "_parameters"):
            return bits_of(self._tensors[number][0])
        if kind == "leaf":
            leaf = self._found.leaves[number]
            return leaf.read() if leaf.held is None else bits_of(leaf.held())
        return bits_of(_said(self._said[number][0]))

    # -- putting back -----------------------------------------------------------------

    def restore(self, *, weights: bool, hooks: bool = True) -> list[Place]:
        """Put everything back; returns weights that could not be."""
        for node in self._found.other():
            if hooks or "_hooks" not in str(node.where[1]):
                node.restore()
        with torch.no_grad():
            for t, _, then in self._tensors:
                if t.data_ptr() != then.data_ptr() or t.shape != then.shape:
                    t.data = then
        for k in self._others.changed():
            if not self._others.restore(k) and not self._restore_kept(
                self._others, k, self._rest[k]
            ):
                _empty(self._others.words[k])
        for leaf in self._found.leaves:
            if not leaf.same():
                if leaf.write is not None:
                    leaf.write(leaf.then)
                else:
                    self._found.replace(leaf.value, pickle.loads(leaf.then))
        for module, _, then in self._said:
            if bits_of(_said(module)) != bits_of(then):
                module.set_extra_state(then)
        return self._restore_weights() if weights else []

    def _restore_weights(self) -> list[Place]:
        lost = []
        for k in self._weights.changed():
            if not self._weights.restore(k) and not self._restore_kept(
                self._weights, k, self._own[k]
            ):
                _empty(self._weights.words[k])
                lost.append(self._own[k])
        return lost

    def _restore_kept(self, contents: Contents, k: int, where: Place) -> bool:
        """From where weights are kept outside of memory, if it is those of before."""
        full = _named(where)
        then = None if self._kept is None else self._kept(full)
        own: Tensor | None = None
        for name, held in (
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ):
            own = held if name == full else own
        if then is None or own is None or not contents.was(k, then):
            return False
        with torch.no_grad():
            own.copy_(then)
        return True

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


def _said(module: nn.Module) -> Any:
    return copy.deepcopy(module.get_extra_state())


def _empty(words: Tensor | None) -> None:
    """Leave nothing of what cannot be put back: not a number, in every float format."""
    if words is not None:
        words.fill_(-1)


def _named(where: Place) -> str:
    module, name = where
    return f"{module}.{name}" if module else str(name)


def carries(where: Place) -> CurvedpError:
    """The error for what would go past the noise."""
    return CouplingError(
        f"{_named(where)!r} changed during a private forward pass: it would carry "
        "private data past the noise (what was there before is back)",
        "write it anew in every forward pass (then it may stay until the backward pass "
        "has ended), return it with the outputs, or keep the layer from updating it "
        "(.eval() on that module, track_running_stats=False)",
    )


def _weights_moved(moved: list[Place], lost: list[Place]) -> CurvedpError:
    names = ", ".join(repr(_named(where)) for where in moved[:3])
    gone = (
        "; " + ", ".join(repr(_named(w)) for w in lost[:3]) + " could not be put back "
        "and holds nothing now: load it from where it came"
        if lost
        else " (what was there before is back)"
    )
    return CouplingError(
        f"the weights {names} were written to during a private pass: they would carry "
        f"private data past the noise{gone}",
        "let no forward or backward pass write to weights (codebooks that follow what "
        "they see); between steps they may be changed as you like",
    )
