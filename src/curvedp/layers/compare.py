"""Do two passes agree, examples apart and module by module?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from curvedp.layers.direct import float_tensors
from curvedp.layers.tolerance import close

__all__ = ["first_coupled", "same_rows", "traced"]


def traced(
    model: nn.Module,
    run: Callable[[], Any],
    keep: Callable[[Any], Any] = lambda output: output,
) -> tuple[Any, list[tuple[str, Any]]]:
    """What ran, and what is kept of each module's output, in the order they finish."""
    trace: list[tuple[str, Any]] = []
    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(
                module.register_forward_hook(
                    lambda m, a, out, n=name: trace.append((n, keep(out)))
                )
            )
        return run(), trace
    finally:
        for handle in handles:
            handle.remove()


def same_rows(x: Any, y: Any, rows: list[int], size: int) -> bool:
    """Whether these examples have the same outputs; ``size`` is that of the batch."""
    pairs = zip(float_tensors(x), float_tensors(y), strict=True)
    return all(
        close(t[rows], u[rows]) for t, u in pairs if t.dim() > 0 and t.shape[0] == size
    )


def first_coupled(
    trace: list[tuple[str, Any]],
    changed: list[tuple[str, Any]],
    rows: list[int],
    size: int,
) -> str:
    """The first module in which other examples than the changed one differ."""
    for (name, x), (_, y) in zip(trace, changed, strict=False):
        if not same_rows(x, y, rows, size):
            return f"layer {name!r}" if name else "the model's own forward"
    return "the model's own forward"
