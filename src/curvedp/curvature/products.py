r"""Products with the Hessian or the Gauss-Newton matrix of a probe's mean loss.

Neither matrix is ever written down: ``H v`` is the gradient of ``<grad, v>``, and
``G v = J^T H_out J v`` takes a derivative along v, the loss's own Hessian in the
outputs, and a backward pass. Both are public if the probe is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from curvedp.curvature.estimate import Estimate, PerExampleLoss
from curvedp.errors import ConfigurationError
from curvedp.layers import as_call
from curvedp.probes import draw

__all__ = [
    "MATRICES",
    "Product",
    "curvature_product",
    "evaluated",
    "in_frame",
    "probe_batches",
]

#: ``[n] -> [n]``, float64: a symmetric matrix that is known by its products.
Product = Callable[[Tensor], Tensor]

#: The second derivative of the loss, or the part of it that has no negative eigenvalue.
MATRICES = ("hessian", "ggn")


def probe_batches(
    model: nn.Module, how: Estimate, generator: torch.Generator
) -> list[tuple[Any, Any]]:
    """Inputs and targets in float64; the model gives the labels where the rule asks."""
    device = next(model.parameters()).device
    if device.type == "mps":
        raise ConfigurationError(
            "products with the Hessian are in float64, which this device lacks",
            "use the CPU (--device cpu)",
        )
    own = next(model.parameters()).dtype

    def batch() -> tuple[Any, Any]:
        drawn = draw(how.probe, how.labels, how.size, generator)
        args, kwargs = as_call(tree_map(lambda x: _as(x, device, own), drawn.inputs))
        with evaluated(model), torch.no_grad():
            targets = drawn.targets(model(*args, **kwargs))
        pair = drawn.inputs, targets
        placed = tree_map(lambda x: _as(x, device, torch.float64), pair)
        return placed[0], placed[1]

    return [batch() for _ in range(how.batches)]


def curvature_product(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    loss: PerExampleLoss,
    batches: Sequence[tuple[Any, Any]],
    matrix: str = "hessian",
    *,
    keep_graphs: bool = False,
) -> Product:
    """``v -> H v`` of the mean loss over all batches.

    Shapes: v is ``[n]``, the parameters flattened in their order. The model runs in
    float64 and in evaluation mode: dropout would make another matrix of every product.

    Args:
        model: left as it was.
        parameters: the values at which, by name; all others are constants.
        loss: per-example loss.
        batches: of equal size, in float64, on the model's device.
        matrix: "hessian" or "ggn".
        keep_graphs: keep the gradient's graph of every batch, for products that take a
            third of the time and the memory of a double backward pass each.
    """
    if matrix not in MATRICES:
        raise ConfigurationError(
            f"unknown matrix {matrix!r}", f"choose one of: {', '.join(MATRICES)}"
        )
    leaves = {n: p.detach().double().requires_grad_() for n, p in parameters.items()}
    others = {
        name: value.detach().double() if value.is_floating_point() else value
        for name, value in [*model.named_parameters(), *model.named_buffers()]
        if name not in leaves
    }
    values = list(leaves.values())
    sizes, device = [p.numel() for p in values], values[0].device
    build = _Hessian if matrix == "hessian" else _GaussNewton
    kept: dict[int, _Hessian | _GaussNewton] = {}

    def built(number: int) -> _Hessian | _GaussNewton:
        if number in kept:
            return kept[number]
        inputs, targets = batches[number]
        args, kwargs = as_call(inputs)
        with evaluated(model), sdpa_kernel(SDPBackend.MATH):
            output = functional_call(model, {**others, **leaves}, args, kwargs)
            made = build(output, lambda out: loss(out, targets).mean(), values)
        if keep_graphs:
            kept[number] = made
        return made

    def product(vector: Tensor) -> Tensor:
        parts = torch.split(vector.to(device, torch.float64), sizes)
        along = [v.reshape(p.shape) for v, p in zip(parts, values, strict=True)]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        for number in range(len(batches)):
            with torch.enable_grad():
                images = built(number).times(along)
            total = total + torch.cat([h.detach().flatten() for h in images])
        return total / len(batches)

    return product


def in_frame(
    product: Product,
    apply: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    adjoint: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
) -> Product:
    """``v -> P H P^T v``: the matrix in the coordinates of a whitened step.

    A step ``theta <- theta - eta P^T (P g + x)`` is plain gradient descent in phi,
    where ``theta = P^T phi``: its gradient is P g and its Hessian ``P H P^T``.

    Args:
        product: with H.
        apply: P.
        adjoint: ``P^T``.
        parameters: names, shapes and order of the flattened values.
    """

    def through(
        vector: Tensor, map: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> Tensor:
        sizes = [p.numel() for p in parameters.values()]
        named = {
            name: part.reshape(p.shape).to(p.dtype)
            for part, (name, p) in zip(
                torch.split(vector, sizes), parameters.items(), strict=True
            )
        }
        mapped = map(named)
        return torch.cat([mapped[name].double().flatten() for name in parameters])

    return lambda vector: through(product(through(vector, adjoint)), apply)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; after that each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Hessian:
    """``d/dtheta <grad, v>``."""

    def __init__(
        self, output: Any, mean_loss: Callable[[Any], Tensor], leaves: list[Tensor]
    ) -> None:
        self._leaves = leaves
        self._grads = torch.autograd.grad(
            mean_loss(output), leaves, create_graph=True, materialize_grads=True
        )

    def times(self, along: list[Tensor]) -> Sequence[Tensor]:
        pairs = zip(self._grads, along, strict=True)
        used = [(g, v) for g, v in pairs if g.requires_grad]
        if not used:  # the loss is linear in the parameters
            return [torch.zeros_like(p) for p in self._leaves]
        return torch.autograd.grad(
            [g for g, _ in used],
            self._leaves,
            [v for _, v in used],
            retain_graph=True,
            materialize_grads=True,
        )


class _GaussNewton:
    """``J^T H_out J v``; J v by differentiating ``J^T u``, which is linear in u."""

    def __init__(
        self, output: Any, mean_loss: Callable[[Any], Tensor], leaves: list[Tensor]
    ) -> None:
        if not isinstance(output, Tensor):
            raise ConfigurationError(
                "the Gauss-Newton matrix is of a model with one tensor as its output, "
                f"not {type(output).__name__}",
                "take the Hessian",
            )
        self._output, self._leaves = output, leaves
        self._free = torch.zeros_like(output, requires_grad=True)
        self._back = torch.autograd.grad(
            output, leaves, self._free, create_graph=True, materialize_grads=True
        )
        self._at = output.detach().requires_grad_()
        (self._slope,) = torch.autograd.grad(
            mean_loss(self._at), self._at, create_graph=True
        )

    def times(self, along: list[Tensor]) -> Sequence[Tensor]:
        pairs = zip(self._back, along, strict=True)
        used = [(g, v) for g, v in pairs if g.requires_grad]
        zeros = [torch.zeros_like(p) for p in self._leaves]
        if not used or not self._slope.requires_grad:
            return zeros
        (forward,) = torch.autograd.grad(
            [g for g, _ in used], self._free, [v for _, v in used], retain_graph=True
        )
        (bent,) = torch.autograd.grad(
            self._slope, self._at, forward, retain_graph=True, materialize_grads=True
        )
        return torch.autograd.grad(
            self._output, self._leaves, bent, retain_graph=True, materialize_grads=True
        )


def _as(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(device, dtype if x.is_floating_point() else x.dtype)
