"""Work that is recorded once as a CUDA graph and then repeated in one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["record"]

T = TypeVar("T")


def record(
    work: Callable[[], T], device: torch.device, *generators: torch.Generator
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

    Raises:
        RuntimeError: it needs the CPU in between.
    """
    drawn = torch.cuda.get_rng_state(device)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    outside = torch.cuda.current_stream(device)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize(device)
        # other threads (a loader's, say) may go on using the device meanwhile
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()  # mostly broken off already
            raise
        graph.capture_end()
    outside.wait_stream(stream)
    torch.cuda.set_rng_state(drawn, device)

    def replay() -> T:
        graph.replay()
        return results

    return replay
