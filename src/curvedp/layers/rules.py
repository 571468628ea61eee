"""A rule per module type: from a module's calls to its :class:`LayerIO`.

A rule is a function ``(site, module, calls) -> LayerIO``. It applies to a module whose
``forward`` is that of the type it is written for (a subclass that overrides it is
another layer) and whose own parameters are those that the type declares. Everything
else that holds parameters is served by :mod:`curvedp.layers.direct`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvedp.layers.conv import ConvGeometry, transposed_input
from curvedp.layers.costs import lean_rows
from curvedp.layers.dense import DenseIO, Geometry
from curvedp.layers.io import DirectIO, LayerIO
from curvedp.layers.joined import joined
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import compute_dtype
from curvedp.layers.refuse import refuse_call

__all__ = ["Call", "Rule", "Site", "dense", "find_rule"]


@dataclass(frozen=True)
class Site:
    """A place in the model where gradients are captured. Public: it holds no data.

    Attributes:
        name: module name in the model ("" is the model itself).
        parameters: own name to full name, of the *trainable* parameters it serves. A
            parameter with several names in the model goes by the first one.
        kind: what serves it, for people to read: a type name, "expanded" or "vmap".
    """

    name: str
    parameters: dict[str, str]
    kind: str

    @property
    def label(self) -> str:
        """The name as it is printed."""
        return self.name or "(the model itself)"


@dataclass(frozen=True, repr=False)
class Call:
    """One call of a module during a forward pass. Private.

    Attributes:
        args: positional arguments, tensors detached.
        kwargs: keyword arguments, tensors detached.
        d: gradients of the loss at the flattened tensor outputs (None: unused).
        lean: whether memory goes before time; see :mod:`curvedp.layers.kept`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    d: tuple[Tensor | None, ...]
    lean: bool = False

    @property
    def x(self) -> Tensor:
        """The first argument, which is the input of every layer with a rule."""
        value = self.args[0] if self.args else next(iter(self.kwargs.values()))
        assert isinstance(value, Tensor)
        return value


Rule = Callable[[Site, nn.Module, Sequence[Call]], LayerIO]


def find_rule(module: nn.Module) -> Rule | None:
    """The rule for a module, or None if only the general ways serve it."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return None
    for base, rule in _RULES.items():
        if isinstance(module, base) and own <= {"weight", "bias"}:
            same_forward = type(module).forward is base.forward
            # convolutions dispatch through _conv_forward, which could be overridden too
            hook = "_conv_forward"
            same_hook = getattr(type(module), hook, None) is getattr(base, hook, None)
            if same_forward and same_hook and not hasattr(module, "parametrizations"):
                return rule
    return None


def _used(calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
    """Input and output gradient of every call that reached the loss."""
    return [(c.x, c.d[0]) for c in calls if c.d[0] is not None]


def _linear(site: Site, module: nn.Module, calls: Sequence[Call]) -> LayerIO:
    assert isinstance(module, nn.Linear)
    return dense(site, LinearGeometry(module.weight.shape), calls)


def _conv(site: Site, module: nn.Module, calls: Sequence[Call]) -> LayerIO:
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return dense(site, ConvGeometry.of(module), calls)


def dense(site: Site, geometry: Geometry, calls: Sequence[Call]) -> LayerIO:
    """Linear layers of any geometry: ``g_i = sum_t d_t a_t^T``."""
    pairs = _used(calls)
    weight, bias = site.parameters.get("weight"), site.parameters.get("bias")
    if weight is not None:
        lean = any(call.lean for call in calls)
        return DenseIO(site.name, weight, bias, pairs, geometry, lean=lean)
    assert bias is not None  # a site has at least one trainable parameter
    rows = [geometry.output_rows(d.to(compute_dtype(d))) for _, d in pairs]
    return DirectIO(site.name, {bias: sum(r.sum(2).flatten(1) for r in rows)})  # type: ignore[dict-item]


def _embedding(site: Site, module: nn.Module, calls: Sequence[Call]) -> LayerIO:
    assert isinstance(module, nn.Embedding)
    return LookupIO(
        site.name,
        site.parameters["weight"],
        module.num_embeddings,
        module.padding_idx,
        _used(calls),
    )


def _conv_transposed(site: Site, module: nn.Module, calls: Sequence[Call]) -> LayerIO:
    """Transposed convolutions: a convolution with input and output exchanged.

    ``dw_i = sum_t x_t (patch of d)_t^T`` with the patches that the convolution of the
    same stride, padding, dilation and groups cuts from d; ``db_i = sum_t d_t``.
    """
    assert isinstance(
        module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    )
    parts: list[LayerIO] = []
    weight, bias = site.parameters.get("weight"), site.parameters.get("bias")
    if weight is not None:
        pairs = [(transposed_input(module, x, d), x) for x, d in _used(calls)]
        geometry = ConvGeometry.transposed(module)
        lean = any(call.lean for call in calls)
        parts.append(DenseIO(site.name, weight, None, pairs, geometry, lean=lean))
    if bias is not None:
        total: Tensor | None = None
        for _, d in _used(calls):
            g = d.to(compute_dtype(d)).flatten(2).sum(2)
            total = g if total is None else total + g
        assert total is not None
        parts.append(DirectIO(site.name, {bias: total}))
    return joined(site.name, parts)


def _embedding_bag(site: Site, module: nn.Module, calls: Sequence[Call]) -> LayerIO:
    """Bags ``[B, N]``: a lookup whose positions share the bag's gradient.

    ``d_t = w_t d`` with ``w_t`` = 1 (sum), the sample's weight, or ``1 / N`` (mean; N
    counts no padding).
    """
    assert isinstance(module, nn.EmbeddingBag)
    pairs = []
    for call in calls:
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        refuse_call(site.label, module, call.args, call.kwargs)
        ids, d = call.x, call.d[0]
        if d is None:
            continue
        d = d.to(compute_dtype(d))
        weights = given.get("per_sample_weights")
        if weights is not None:
            share = weights.to(d.dtype)
        elif module.mode == "mean":
            padding = -1 if module.padding_idx is None else module.padding_idx
            real = (ids != padding).to(d.dtype)
            share = real / real.sum(1, keepdim=True).clamp_min(1)
        else:
            share = torch.ones_like(ids, dtype=d.dtype)
        pairs.append((ids, share.unsqueeze(2) * d.unsqueeze(1)))
    weight = site.parameters["weight"]
    rows, padding_idx = module.num_embeddings, module.padding_idx
    return LookupIO(site.name, weight, rows, padding_idx, pairs)


def _norm(site: Site, module: nn.Module, calls: Sequence[Call]) -> LayerIO:
    """Norm layers: ``dw_i = sum_t d_t * x^_t``, ``db_i = sum_t d_t``, written down."""
    total: dict[str, Tensor] = {}
    lean = any(call.lean for call in calls)
    for x, d in _used(calls):
        pairs = [(x, d)]
        if lean:  # both in float32, their product, and what is normalised
            rows = lean_rows(4 * x[:1].numel(), kind_of(x))
            pairs = list(zip(torch.split(x, rows), torch.split(d, rows), strict=True))
        parts = [_norm_gradients(site, module, *pair) for pair in pairs]
        for full in site.parameters.values():
            pieces = [part[full] for part in parts]
            g = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            total[full] = g if full not in total else total[full] + g
    return DirectIO(site.name, total)


def _norm_gradients(
    site: Site, module: nn.Module, x: Tensor, d: Tensor
) -> dict[str, Tensor]:
    d = d.to(compute_dtype(d))
    normalised = _normalise(module, x.to(d.dtype))
    shape = next(iter(module.parameters(recurse=False))).shape
    found = {}
    for own, full in site.parameters.items():
        g = d * normalised if own == "weight" else d
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # parameters come last
            g = g.reshape(g.shape[0], -1, *shape).sum(1)
        else:  # channels stand at dimension 1
            g = g.flatten(2).sum(2) if g.dim() > 2 else g
        found[full] = g
    return found


def _normalise(module: nn.Module, x: Tensor) -> Tensor:
    """The layer without its affine part."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    return F.instance_norm(x, use_input_stats=True, eps=module.eps)


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.ConvTranspose1d: _conv_transposed,
    nn.ConvTranspose2d: _conv_transposed,
    nn.ConvTranspose3d: _conv_transposed,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GroupNorm: _norm,
    nn.InstanceNorm1d: _norm,
    nn.InstanceNorm2d: _norm,
    nn.InstanceNorm3d: _norm,
}
