"""What a model held when it was looked at, what is another now, and the way back.

Containers are compared by identity, memory by its bits, everything else by what tells
it from other values (:mod:`curvedp.layers.held`, :mod:`curvedp.layers.contents`). What
it means that something is another is for :mod:`curvedp.layers.state` to say.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.errors import CouplingError, CurvedpError
from curvedp.layers.bits import bits_of
from curvedp.layers.contents import Contents
from curvedp.layers.held import Place, Scan, missing, scan

__all__ = ["Snapshot", "Spot", "Spots", "carries", "said", "weights_moved"]

#: Gives a weight from before that is not held in memory, by name; None without it.
Kept = Callable[[str], Tensor | None]

#: Something that is another than it was: its kind, which of them, and perhaps a key.
Spot = tuple[Hashable, ...]
Spots = dict[Spot, Place]


class Snapshot:
    """A look at a model.

    Args:
        model: the user's.
        anew: places that every forward pass writes anew.
        kept: finds weights that were too large to be copied.

    Attributes:
        anew: likewise.
    """

    def __init__(
        self, model: nn.Module, anew: Iterable[Place] = (), kept: Kept | None = None
    ) -> None:
        self._model = model
        self.anew = frozenset(anew)
        self._kept = kept
        self._scan: Scan | None = None
        self._weights = self._others = Contents([])
        self._own: list[Place] = []
        self._said: list[tuple[nn.Module, Place, Any]] = []

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
            if bits_of(said(module)) != bits_of(then):
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
        return bits_of(said(self._said[number][0]))

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
            if bits_of(said(module)) != bits_of(then):
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


def said(module: nn.Module) -> Any:
    """What ``get_extra_state`` gives, as it is now."""
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


def weights_moved(moved: list[Place], lost: list[Place]) -> CurvedpError:
    """The error for weights that were written; it names those that are lost."""
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
