r"""A pass as one program: forward, loss and backward compiled by ``torch.compile``.

The pass of :mod:`curvedp.train.passes` runs once on tensors without values, hooks and
backward included, and every operation on tensors that it makes is written down: one
graph, from parameters and batch to the tensors of all LayerIO. That graph is compiled.
Nothing of it can be left to eager mode, so there are no graph breaks: a model whose
Python looks at values (an ``if`` on a tensor) is refused.

Where the program ends is a matter of privacy. A compiler may compute a value twice, in
two kernels and with other roundings; a norm that was taken of one of them would say
nothing of the other. So a program ends at the LayerIO: their tensors are in memory,
and norms and clipped sums are computed from these, by the code that eager runs use.

A program is compiled anew when something else than values changes: shapes and dtypes of
the batch, modes of modules. Random draws (dropout) are torch's own. What the forward
pass does in Python (counters, prints) happens when it is compiled and not in each step.

Before a program sees private data it is run on a synthetic batch, and what it gives is
compared, example by example, with the pass that it was made from.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from curvedp.errors import (
    ConfigurationError,
    CouplingError,
    CurvedpError,
    private_text_shown,
)
from curvedp.layers import LayerIO, Synthesiser
from curvedp.layers.memory import version
from curvedp.layers.widened import changed
from curvedp.train.passes import RecordedPass

__all__ = ["CompiledPass"]

#: Programs kept at a time; a run has one, or a few where the batches differ in shape.
MOST_PROGRAMS = 8

#: Largest distance of an example's values from eager ones, over the longest example's,
#: by the coarsest dtype that the pass computes in. Fused operations keep digits that
#: eager ones round away: 1 % was seen in bfloat16.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}

#: Factor on what rounding alone moves, where values consist of little else.
ROUNDING_ALONE = 8.0

#: Characters that are shown of what a compiler says.
LONGEST_MESSAGE = 400

Program = Callable[[list[Any]], tuple[list[LayerIO], Tensor]]


@dataclass(frozen=True)
class _Given:
    """All that a program takes, its structure, and what it is compiled for."""

    leaves: list[Any]
    spec: TreeSpec
    key: Hashable


class CompiledPass:
    """The same LayerIO as a :class:`RecordedPass`, up to rounding.

    Args:
        recorded: the pass.
        synthetic: makes batches to try a program on; without it none is tried.
        backend: of ``torch.compile``.

    Attributes:
        loss: mean over the rows of the last batch, padding included; private.
    """

    def __init__(
        self,
        recorded: RecordedPass,
        synthetic: Synthesiser | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self._recorded = recorded
        self.rows = recorded.rows
        self._synthetic = synthetic
        self._backend = backend
        self._programs: dict[Hashable, Program] = {}
        self._tries = False  # on synthetic rows, of which an error may tell
        self.loss: Tensor | None = None

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        *,
        point: Mapping[str, Tensor] | None = None,
        keep_inputs: Collection[str] = (),
    ) -> tuple[list[LayerIO], Tensor]:
        """As of the pass that it is made from.

        Raises:
            ConfigurationError: this model's pass cannot be compiled.
        """
        kept = frozenset(keep_inputs)
        given = self._given(inputs, targets, point, kept)
        if given.key not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:
                self._programs.clear()
            program = self._compile(given, kept)
            self._try_out(program, given.key, point, kept)
            self._programs[given.key] = program
        ios, self.loss = self._programs[given.key](given.leaves)
        return ios, self.loss

    def _given(
        self,
        inputs: Any,
        targets: Any,
        point: Mapping[str, Tensor] | None,
        kept: frozenset[str],
    ) -> _Given:
        model = self._recorded.model
        values = {n: p.detach() for n, p in model.named_parameters()}
        values.update(point or {})
        buffers = dict(model.named_buffers())
        leaves, spec = tree_flatten((values, buffers, inputs, targets))
        signature = tuple(
            (x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else repr(x)
            for x in leaves
        )
        modes = tuple(module.training for module in model.modules())
        device = self._device.type
        cast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return _Given(leaves, spec, (signature, str(spec), modes, cast, kept))

    @property
    def _device(self) -> torch.device:
        return next(self._recorded.model.parameters()).device

    def _compile(self, given: _Given, kept: frozenset[str]) -> Program:
        where = [i for i, leaf in enumerate(given.leaves) if isinstance(leaf, Tensor)]
        pattern: list[LayerIO] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            leaves = list(given.leaves)
            for i, tensor in zip(where, tensors, strict=True):
                leaves[i] = tensor
            values, buffers, x, y = tree_unflatten(leaves, given.spec)
            before = {name: version(b) for name, b in buffers.items()}
            with _with_buffers(self._recorded.model, buffers):
                ios, loss = self._recorded(x, y, point=values, keep_inputs=kept)
            for name, buffer in buffers.items():
                if version(buffer) != before[name]:
                    raise _changes_buffer(name)
            pattern[:] = ios
            return [*_tensors(ios), loss]

        try:
            trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
            graph = trace(*[given.leaves[i] for i in where])
        except (CurvedpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _not_compilable(error, private_text_shown()) from error
        lifted = _lift_constants(graph)
        options: dict[str, Any] = {}
        if self._backend == "inductor":  # random draws as without a compiler
            options["options"] = {"fallback_random": True}
        compiled = torch.compile(
            graph, fullgraph=True, dynamic=False, backend=self._backend, **options
        )

        has_run = False  # the first call compiles

        def program(leaves: list[Any]) -> tuple[list[LayerIO], Tensor]:
            nonlocal has_run
            # casts of autocast are in the graph already
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                try:
                    found = compiled(*[leaves[i] for i in where], *lifted)
                except Exception as error:
                    if has_run or isinstance(error, torch.OutOfMemoryError):
                        raise
                    told = self._tries or private_text_shown()
                    raise _not_compilable(error, told) from error
            has_run = True
            rest = iter(found)
            ios = [changed(io, lambda _: next(rest)) for io in pattern]
            return ios, next(rest)

        return program

    def _try_out(
        self,
        program: Program,
        key: Hashable,
        point: Mapping[str, Tensor] | None,
        kept: frozenset[str],
    ) -> None:
        """Compile for good, on a synthetic batch where one of this shape can be made.

        Raises:
            ConfigurationError: it cannot be compiled, or does not do what it should.
        """
        if self._synthetic is None:
            return
        batch = self._synthetic(self._recorded.rows, torch.Generator().manual_seed(0))
        given = self._given(batch.inputs, batch.targets, point, kept)
        if given.key != key:
            return
        rows = _some_rows(self.rows)
        eager = partial(self._recorded, batch.inputs, batch.targets, keep_inputs=kept)
        self._tries = True
        try:
            theirs = self._drawn(lambda: program(given.leaves), rows)
        finally:
            self._tries = False
        ours = self._drawn(lambda: eager(point=point), rows)
        coarsest = max(self._dtypes(), key=lambda dtype: TOLERANCE.get(dtype, 0.1))
        allowed = [TOLERANCE.get(coarsest, 0.1) * _longest(x) for x in ours]
        if _within(ours, theirs, allowed):
            return
        # What is mostly rounding (the queries of a net that has not learnt yet) may be
        # as far apart as rounding the parameters moves it.
        shaken = self._shaken(point, torch.finfo(coarsest).eps)
        moved = self._drawn(lambda: eager(point=shaken), rows)
        for k, (x, y) in enumerate(zip(ours, moved, strict=True)):
            allowed[k] = allowed[k] + ROUNDING_ALONE * _longest(x - y)
        if not _within(ours, theirs, allowed):
            raise ConfigurationError(
                "the compiled pass does not compute what the model does: it has other "
                "values on a synthetic batch",
                "leave compile out; the compiler of this torch version has a fault "
                "here, or the model draws random numbers that are not torch's",
            )

    def _drawn(
        self, work: Callable[[], tuple[list[LayerIO], Tensor]], rows: list[int]
    ) -> list[Tensor]:
        """Some examples' values, as rows; random draws are the same each time."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            ios, _ = work()
        return [x[rows].double().flatten(1) for x in _tensors(ios)]

    def _shaken(
        self, point: Mapping[str, Tensor] | None, eps: float
    ) -> dict[str, Tensor]:
        """Parameters off by a rounding each."""
        generator = torch.Generator().manual_seed(1)
        values = {n: p.detach() for n, p in self._recorded.model.named_parameters()}
        values.update(point or {})
        signs = {
            n: torch.randint(0, 2, p.shape, generator=generator)
            for n, p in values.items()
        }
        return {
            n: p * (1 + eps * (2.0 * signs[n].to(p) - 1)) for n, p in values.items()
        }

    def _dtypes(self) -> set[torch.dtype]:
        """That the pass computes in."""
        found = {p.dtype for p in self._recorded.model.parameters()}
        with self._recorded.precision.during_forward():
            if torch.is_autocast_enabled(self._device.type):
                found.add(torch.get_autocast_dtype(self._device.type))
        return found


def _tensors(ios: list[LayerIO]) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        found.append(x)
        return x

    for io in ios:
        changed(io, collect)
    return found


@contextmanager
def _with_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other buffers."""
    own = dict(model.named_buffers())
    by_id = {id(own[name]): value for name, value in values.items()}
    places = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        for held, name, buffer in places:
            held[name] = by_id[id(buffer)]
        yield
    finally:
        for held, name, buffer in places:
            held[name] = buffer


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Make tensors that the pass met on its way arguments, and list them.

    As constants their values of now could be compiled in.
    """
    lifted: list[Tensor] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph, node.target)
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"lifted_{len(lifted)}")
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
        lifted.append(value.detach())
    graph.recompile()
    return lifted


def _some_rows(rows: int) -> list[int]:
    """First, last and some between: all of them may not fit beside a pass."""
    count = min(rows, 8)
    return sorted({round(k * (rows - 1) / max(1, count - 1)) for k in range(count)})


def _longest(rows: Tensor) -> float:
    return float(rows.norm(dim=1).max()) if rows.numel() else 0.0


def _within(ours: list[Tensor], theirs: list[Tensor], allowed: Sequence[float]) -> bool:
    """Whether each example's values are those of eager mode, up to so much."""
    pairs = zip(ours, theirs, allowed, strict=True)
    return all(x.shape == y.shape and _longest(x - y) <= far for x, y, far in pairs)


def _changes_buffer(name: str) -> CouplingError:
    return CouplingError(
        f"the buffer {name!r} changed during a private forward pass: it would carry "
        "private data past the noise",
        "keep the layer from updating it (.eval() on that module, or "
        "track_running_stats=False), or leave compile out: caches and counters may "
        "change in a pass that is not compiled",
    )


def _not_compilable(error: Exception, told: bool) -> ConfigurationError:
    said = "CURVEDP_DEBUG=1 shows what torch says"
    if told:
        said = " ".join(str(error).split())[:LONGEST_MESSAGE]
    return ConfigurationError(
        f"this model's pass cannot be compiled: {type(error).__name__}: {said}",
        "leave compile out; a model that branches on values (if on a tensor) cannot "
        "be compiled, and on a CPU torch needs a C++ compiler (g++)",
    )
