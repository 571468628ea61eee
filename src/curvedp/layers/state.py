"""Nothing that a private pass leaves in the model gets past the noise.

Whoever stores a model, or pickles it, takes along what its forward and backward passes
have written: buffers, frozen parameters, attributes, whatever ``get_extra_state``
gives. Only released parameters may carry what is private. So a :class:`State` looks at
everything that the model holds (:mod:`curvedp.layers.held`) before a private pass and
after it, and what is another then was

- *written anew by every forward pass* (a KL term, an attention map). Such places are
  found when the model is attached, by :func:`written_anew`. The loss may use what
  stands there, and after the backward pass it is gone: what stood there before the
  pass is back;
- *a cache or a counter* (the vectors of a spectral norm, a table of rotations, a
  mask). A pass over synthetic rows, begun with the same state and the same random
  numbers, leaves the same bits: these stay, and they are those of the synthetic pass;
- anything else. It is put back, then the pass is refused.

Weights are part of it: they are compared over the whole pass, the backward pass
included, and between passes they are the user's (a moving average, merged adapters).
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvedp.errors import CouplingError, CurvedpError
from curvedp.layers.contents import Contents
from curvedp.layers.held import Place, Scan, missing, scan
from curvedp.layers.synthetic import Batch, Synthesiser, as_call, synthesiser_like

__all__ = ["State", "written_anew"]

#: Rows of the first synthetic pass that may explain a change; then all of them.
FEW = 2

#: Gives a weight from before that is not held in memory, by name; None without it.
Kept = Callable[[str], Tensor | None]


class State:
    """What a model holds, over one pass at a time.

    Args:
        model: the user's.
        anew: places that every forward pass writes anew.
        synthesise: makes rows of the model's shapes, to explain caches and counters;
            without it none is explained.
        kept: finds weights that were too large to be copied.
        when_weights_moved: called before the error that says so.
    """

    def __init__(
        self,
        model: nn.Module,
        anew: Iterable[Place] = (),
        synthesise: Synthesiser | None = None,
        kept: Kept | None = None,
        when_weights_moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._anew = frozenset(anew)
        self._synthesise = synthesise
        self._kept = kept
        self._when_weights_moved = when_weights_moved
        self.is_open = False
        self._scan: Scan | None = None

    # -- around a pass ----------------------------------------------------------------

    def open(self, *, weights: bool = True) -> bool:
        """Look at everything; True if it is not what was there at the last look."""
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
        self._random = _random_state(self._model)
        self.is_open = True
        return scanned

    def rewind(self) -> None:
        """Put back what was there at the last look, but for weights and hooks."""
        self._restore(weights=False, hooks=False)

    def after_forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        """Refuse what the forward pass left, unless it may stay or will go.

        Args:
            args: of the pass; what is synthetic has their shapes.
            kwargs: likewise.
            run: a forward pass; the model's own if it is not given.

        Raises:
            CouplingError: with everything put back before.
        """
        spots = self._spots()
        left = self._foreign(spots)
        if not left:
            return
        bits = {spot: self._bits_of(spot) for spot in left if spot[0] != "weights"}
        kept = self._kept_anew()
        if len(bits) < len(left):
            self._refuse(left)
        self._restore(weights=False)
        if not self._explained(bits, args, kwargs, run or self._run):
            self._refuse(left)
        self._restore_anew()
        weights = self._weights, self._own
        self._look()
        self._weights, self._own = weights  # as they were before the pass
        self._others.hold()
        self._said = [(m, w, _said(m)) for m, w in self._found.speaking]
        kept()

    def close(self, *, quietly: bool = False) -> None:
        """After the backward pass: put back what was written anew, refuse the rest.

        Args:
            quietly: put everything back and raise nothing, but for weights: for passes
                that are given up, and those whose Python is run when it is recorded.

        Raises:
            CouplingError: with everything put back before.
        """
        if not self.is_open:
            return
        self.is_open = False
        spots = self._spots(printed=True)
        left = self._foreign(spots)
        hard = {s: w for s, w in left.items() if s[0] in ("weights", "others", "said")}
        if hard or (left and not quietly):
            self._refuse(hard or left)
        if spots:
            self._restore(weights=False)

    def require_closed(self) -> None:
        """Refuse what a pass that is not over has left, before something is stored.

        Raises:
            CouplingError: with everything put back before.
        """
        if self.is_open and (left := self._foreign(self._spots(printed=True))):
            self._refuse(left)

    def _refuse(self, left: dict[tuple[Hashable, ...], Place]) -> NoReturn:
        """Put everything back, then say what it was."""
        self.is_open = False
        moved = [self._own[k] for k in self._weights.changed()]
        lost = self._restore(weights=True)
        if moved:
            self._when_weights_moved()
            raise _weights_moved(moved, lost)
        raise _carries(next(iter(left.values())))

    # -- what is another --------------------------------------------------------------

    @property
    def _found(self) -> Scan:
        assert self._scan is not None
        return self._scan

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

    def _moved_memory(self) -> bool:
        tensors = self._found.tensors
        return self._where != (
            [t.data_ptr() for t, _ in tensors],
            [t.shape for t, _ in tensors],
        )

    def _spots(self, *, printed: bool = False) -> dict[tuple[Hashable, ...], Place]:
        """What is another than it was, and its place. Empty in nearly every pass."""
        found: dict[tuple[Hashable, ...], Place] = {}
        if not self._found.same():
            for node in self._found.other():
                if node.where[1] is None:
                    kind = "key" if node.is_module else "registered"
                    for key in node.changed_keys():
                        found[kind, id(node), key] = node.where[0], str(key)
                else:
                    found["node", id(node)] = node.where
        if self._moved_memory():
            for k, (t, where, then) in enumerate(self._tensors):
                if t.data_ptr() != then.data_ptr() or t.shape != then.shape:
                    found["tensor", k] = where
        for k in self._others.changed():
            found["others", k] = self._rest[k]
        for k, leaf in enumerate(self._found.leaves):
            if not leaf.same():
                found["leaf", k] = leaf.where
        for k, (module, where, then) in enumerate(self._said):
            if _bits(_said(module)) != _bits(then):
                found["said", k] = (where[0], "get_extra_state")
        for k in self._weights.changed(printed=printed):
            found["weights", k] = self._own[k]
        return found

    def _foreign(
        self, spots: dict[tuple[Hashable, ...], Place]
    ) -> dict[tuple[Hashable, ...], Place]:
        """Without what every pass writes anew."""
        soft = ("key", "node")
        return {
            spot: where
            for spot, where in spots.items()
            if where not in self._anew or spot[0] not in soft
        }

    def _bits_of(self, spot: tuple[Hashable, ...]) -> Hashable:
        kind, number = spot[0], spot[1]
        if kind in ("key", "registered", "node"):
            (node,) = [
                n for n in (*self._found.nodes, *self._found.empty) if id(n) == number
            ]
            if kind == "node":
                return _bits(node.container)
            return _bits(node.container.get(spot[2], missing))
        assert isinstance(number, int)
        if kind == "others":
            return _bits(self._others.words[number])
        if kind == "tensor":
            return _bits(self._tensors[number][0])
        if kind == "leaf":
            leaf = self._found.leaves[number]
            return leaf.read() if leaf.held is None else _bits(leaf.held())
        return _bits(_said(self._said[number][0]))

    # -- putting back -----------------------------------------------------------------

    def _restore(self, *, weights: bool, hooks: bool = True) -> list[Place]:
        """Put everything back; returns weights that could not be."""
        for node in self._found.other():
            if hooks or "_hooks" not in str(node.where[1]):
                node.restore()
        with torch.no_grad():
            for t, _, then in self._tensors:
                if t.data_ptr() != then.data_ptr() or t.shape != then.shape:
                    t.data = then
        for k in self._others.changed():
            if not self._others.restore(k):
                _empty(self._others.words[k])
        for leaf in self._found.leaves:
            if not leaf.same():
                if leaf.write is not None:
                    leaf.write(leaf.then)
                else:
                    self._found.replace(leaf.value, pickle.loads(leaf.then))
        for module, _, then in self._said:
            if _bits(_said(module)) != _bits(then):
                module.set_extra_state(then)
        return self._restore_weights() if weights else []

    def _restore_weights(self) -> list[Place]:
        lost = []
        for k in self._weights.changed():
            if not self._weights.restore(k) and not self._restore_kept(k):
                _empty(self._weights.words[k])
                lost.append(self._own[k])
        return lost

    def _restore_kept(self, k: int) -> bool:
        """From where weights are kept outside of memory, if it is those of before."""
        full = _named(self._own[k])
        then = None if self._kept is None else self._kept(full)
        own = dict(self._model.named_parameters(remove_duplicate=False)).get(full)
        if then is None or own is None or not self._weights.was(k, then):
            return False
        with torch.no_grad():
            own.copy_(then)
        return True

    def _kept_anew(self) -> Callable[[], None]:
        """Takes what the pass wrote anew; puts it there again when it is called."""
        nodes = [(n, n.content()) for n in self._found.other() if n.where in self._anew]
        attributes = [
            (node.container, key, node.container[key])
            for node in self._found.other()
            if node.where[1] is None
            for key in node.changed_keys()
            if (node.where[0], str(key)) in self._anew and key in node.container
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
            if node.where in self._anew:
                node.restore()
            elif node.where[1] is None:
                for key in node.changed_keys():
                    if (node.where[0], str(key)) in self._anew:
                        node.restore_key(key)

    # -- caches and counters ----------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._model(*args, **kwargs)

    def _explained(
        self,
        bits: dict[tuple[Hashable, ...], Hashable],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    ) -> bool:
        """Whether a synthetic pass from the same state leaves the same bits."""
        if self._synthesise is None:
            return False
        for rows in dict.fromkeys((FEW, _rows(args, kwargs))):
            given = _synthetic(self._model, self._synthesise, args, kwargs, rows)
            self._restore(weights=False)  # to make them may take a pass
            if given is None:
                return False
            with _random_numbers(self._model, self._random), torch.no_grad():
                try:
                    run(*given)
                except Exception:  # the model's own: such rows explain nothing
                    self._restore(weights=False)
                    continue
            left = self._foreign(self._spots())
            if left.keys() == bits.keys() and all(
                self._bits_of(spot) == bits[spot] for spot in left
            ):
                return True
            self._restore(weights=False)
        return False


# -- at attach time --------------------------------------------------------------------


def written_anew(
    model: nn.Module, synthesise: Synthesiser, seed: int = 0
) -> frozenset[Place]:
    """Places that every forward pass writes anew, whatever stood there before.

    Found with synthetic rows: what two batches leave is not the same (else it is a
    cache or a counter), and what one of them leaves, and the model's output, does not
    depend on what the other had left.

    Raises:
        CouplingError: something keeps what it has seen, and goes on from there.
    """
    state = State(model)
    start = _random_state(model)

    def passed(given: Batch) -> tuple[Any, dict[Any, Hashable], dict[Any, Place]]:
        args, kwargs = as_call(given.inputs)
        with _random_numbers(model, start), torch.no_grad():
            output = model(*args, **kwargs)
        spots = state._spots(printed=True)
        if any(spot[0] == "weights" for spot in spots):
            state._refuse(spots)
        return _bits(output), {s: state._bits_of(s) for s in spots}, spots

    state.open()
    try:
        generator = torch.Generator().manual_seed(seed + 5)
        batch, other = synthesise(FEW, generator), synthesise(FEW, generator)
        state._restore(weights=True)  # to make them may take a pass
        first, left, places = passed(batch)
        if not left:
            return frozenset()
        state._restore(weights=False)
        _, left_by_other, more = passed(other)
        places |= more
        differ = {
            spot
            for spot in left.keys() | left_by_other.keys()
            if left.get(spot) != left_by_other.get(spot)
        }
        hard = [places[s] for s in differ if s[0] not in ("key", "node")]
        if hard:
            raise _carries(hard[0])
        state._anew = frozenset(places[s] for s in differ)
        kept = state._kept_anew()
        state._restore(weights=False)
        kept()
        again, left_again, _ = passed(batch)
        kept_on = [s for s in differ if left_again.get(s) != left.get(s)]
        if kept_on or (differ and again != first):
            raise _carries(places[(kept_on or list(differ))[0]])
        return state._anew
    finally:
        state._restore(weights=True)


# -- small helpers ---------------------------------------------------------------------


def _said(module: nn.Module) -> Any:
    return copy.deepcopy(module.get_extra_state())


def _bits(value: Any, seen: tuple[int, ...] = ()) -> Hashable:
    """What tells a value from every other one, bit by bit."""
    kind = type(value).__name__
    if id(value) in seen:
        return kind
    seen = (*seen, id(value))
    if isinstance(value, Tensor):
        held = value.detach()
        if held.is_sparse or held.is_quantized or held.device.type == "meta":
            return kind, str(held)
        flat = held.cpu().contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        digest = hashlib.blake2b(raw).digest()
        return kind, str(value.dtype), tuple(value.shape), digest
    if isinstance(value, dict):
        return kind, tuple((_bits(k, seen), _bits(v, seen)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(_bits(v, seen) for v in value)
    if value is missing or value is None or isinstance(value, bool | str | bytes):
        return kind, value
    if isinstance(value, int | float | complex):
        return kind, repr(value)
    if isinstance(value, nn.Module) or hasattr(value, "__dict__"):
        return kind, _bits(vars(value), seen)
    try:
        return kind, pickle.dumps(value)
    except Exception:  # of whatever kind; it then equals itself alone
        return kind, id(value)


def _random_state(model: nn.Module) -> dict[torch.device | None, Tensor]:
    states: dict[torch.device | None, Tensor] = {None: torch.get_rng_state()}
    for device in {p.device for p in model.parameters() if p.is_cuda}:
        if not torch.cuda.is_current_stream_capturing():
            states[device] = torch.cuda.get_rng_state(device)
    return states


@contextmanager
def _random_numbers(
    model: nn.Module, states: dict[torch.device | None, Tensor]
) -> Iterator[None]:
    """As they were at a time, and after it as if nothing had been drawn."""
    devices = [device for device in states if device is not None]
    with torch.random.fork_rng(devices=devices):
        for device, state in states.items():
            if device is None:
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        yield


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    leaves = tree_flatten((args, kwargs))[0]
    sizes = [len(x) for x in leaves if isinstance(x, Tensor) and x.dim()]
    return sizes[0] if sizes else FEW


def _synthetic(
    model: nn.Module,
    synthesise: Synthesiser,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: int,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of these shapes without anything of their values; None if unknown.

    What is no tensor is taken from the synthetic batch too: it may be made of data.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = as_call(synthesise(rows, generator).inputs)
    ours, spec = tree_flatten(drawn)
    given, other = tree_flatten((args, kwargs))
    if spec != other:
        return None
    alike = [
        isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[1:] == y.shape[1:]
        for x, y in zip(given, ours, strict=True)
        if isinstance(x, Tensor)
    ]
    if all(alike):
        return drawn
    template = [
        x if isinstance(x, Tensor) else y for x, y in zip(given, ours, strict=True)
    ]
    filled = tree_unflatten(template, spec)
    made = synthesiser_like(Batch(filled, None), model)(rows, generator).inputs
    result: tuple[tuple[Any, ...], dict[str, Any]] = made
    return result


def _empty(words: Tensor | None) -> None:
    """Leave nothing of what cannot be put back: not a number, in every float format."""
    if words is not None:
        words.fill_(-1)


def _named(where: Place) -> str:
    module, name = where
    return f"{module}.{name}" if module else str(name)


def _carries(where: Place) -> CurvedpError:
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
