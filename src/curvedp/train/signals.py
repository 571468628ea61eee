"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_on_signals"]


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Within this context the first signal asks to stop; the second one interrupts.

    Yields a function that gives the number of the signal that came, or 0.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        request_stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {n: signal.signal(n, handle) for n in numbers}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
