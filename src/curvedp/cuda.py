"""Few launches instead of many: work recorded as a CUDA graph, copies made as one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["fill", "own_values", "record"]

T = TypeVar("T")

#: Where graphs are recorded, by device. Libraries keep a workspace for every stream.
_streams: dict[torch.device, Any] = {}
#: Bytes that the allocator holds and nobody uses, from which on they are returned
#: before a recording.
UNUSED = 2**30


def own_values(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, made together."""
    copies = {name: torch.empty_like(value) for name, value in values.items()}
    fill(copies, values)
    return copies


def fill(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values to where others stand, by name."""
    if places:
        torch._foreach_copy_(list(places.values()), [values[name] for name in places])


def record(
    work: Callable[[], T],
    device: torch.device,
    *generators: torch.Generator,
    pool: Any = None,
) -> Callable[[], T]:
    """A function that repeats ``work`` with what lies in its inputs' memory by then.

    It always returns the same tensors, overwritten. ``work`` runs once before it is
    recorded, because libraries set themselves up at their first call. Neither run moves
    torch's own generator of the device.

    Args:
        work: operations on the device alone, the same ones whatever the values are.
        device: a CUDA device.
        generators: that it draws from besides torch's own. A replay reads seed and
            offset from them, so it draws anew as often as they move.
        pool: memory that it shares with graphs which are replayed at other times, a
            ``torch.cuda.graph_pool_handle()``: each may overwrite what another left.

    Raises:
        RuntimeError: it needs the CPU in between.
    """
    drawn = torch.cuda.get_rng_state(device)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    outside = torch.cuda.current_stream(device)
    stream = _stream(device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize(device)
        _give_back(device)
        # other threads (a loader's, say) may go on using the device meanwhile
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            results = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()  # mostly broken off already
            raise
        with warnings.catch_warnings():
            # work may be nothing but to hand on what it was given
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()
    outside.wait_stream(stream)
    torch.cuda.set_rng_state(drawn, device)

    def replay() -> T:
        graph.replay()
        return results

    return replay


def _give_back(device: torch.device) -> None:
    """Return what the run before has left: a recording has memory of its own."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if held >= UNUSED:
        torch.cuda.empty_cache()


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
