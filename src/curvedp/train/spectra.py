r"""Before the first private step: what correlated noise is designed for.

The spectrum is that of the loss on probes, at the initial (or pretrained) parameters,
in the frame in which the first steps are made. It depends on public values alone, and
is found once: the ledger's header holds what came out, and a run that is resumed takes
it from there, whatever parameters its model has by then. Other runs that start from
the same parameters find it in a cache (:mod:`curvedp.curvature.kept_spectra`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from curvedp.accounting import read_ledger
from curvedp.barrier import Provenance
from curvedp.clipping import ClippingRule
from curvedp.curvature import (
    Estimate,
    curvature_product,
    curvature_spectrum,
    fingerprint,
    in_frame,
    probe_batches,
    probe_pass,
    remembered,
)
from curvedp.errors import CurvedpError
from curvedp.layers import Coverage, PerExampleLoss
from curvedp.noise import RandomStreams, Stream
from curvedp.noise.strategies import NoiseCurve, workload_from_json
from curvedp.plan import DesignedFor
from curvedp.recipes import Eigenvalues
from curvedp.train.whitened import WhitenerSource
from curvedp.whitening import IdentityWhitener, Whitener

__all__ = ["find_design", "stored_design"]

#: Digits that are kept of an eigenvalue: rounding of sums is no other design.
_DIGITS = 6


def stored_design(run_dir: Path | None) -> DesignedFor | None:
    """What an earlier sitting of the run has found; None for a new run.

    What cannot be read is not for us to refuse: opening the ledger will.
    """
    path = None if run_dir is None else run_dir / "ledger.jsonl"
    if path is None or not path.exists():
        return None
    try:
        noise = read_ledger(path).header.facts["noise"]
        return DesignedFor(workload_from_json(noise["workload"]), noise["spectrum"])
    except (CurvedpError, KeyError, TypeError):
        return None


def find_design(
    model: nn.Module,
    coverage: Coverage,
    loss: PerExampleLoss,
    settings: Eigenvalues,
    how: Estimate,
    whiteners: WhitenerSource,
    rule: ClippingRule,
    learning_rate: float,
    streams: RandomStreams,
) -> DesignedFor:
    """The NoiseCurve workload of a model that has made no step yet.

    Args:
        model: at its first parameters; left as it was.
        coverage: its verified sites.
        loss: per-example loss.
        settings: matrix, and how many eigenvalues.
        how: the probe.
        whiteners: give the frame of the first step.
        rule: how gradients are clipped in it.
        learning_rate: eta, taken to be constant.
        streams: the public probe stream is in them.
    """
    whitener = whiteners.at(0)
    named = dict(model.named_parameters())
    parameters = {name: named[name].detach() for name in coverage.parameters}
    device = next(iter(parameters.values())).device
    seed = streams.torch_seed(Stream.SPECTRUM) % 2**63
    batches = probe_batches(model, how, torch.Generator().manual_seed(seed))
    product = curvature_product(
        model, parameters, loss, batches, settings.spectrum_matrix, keep_graphs=True
    )
    framed = not isinstance(whitener, IdentityWhitener)
    if framed:
        product = in_frame(product, whitener.apply, whitener.adjoint, parameters)
    size = sum(p.numel() for p in parameters.values())
    provenance = _together(
        how.probe.provenance, whiteners.provenance if framed else None
    )
    find = partial(
        curvature_spectrum, product, size, provenance,
        top=settings.spectrum_top, tail=settings.spectrum_tail, seed=seed % 2**32,
        device=device,
    )  # fmt: skip
    facts = [settings.facts(), list(parameters), str(model), whitener.frame, str(seed)]
    tensors = [
        x
        for x in tree_leaves((model.state_dict(), batches))
        if isinstance(x, torch.Tensor)
    ]
    name = fingerprint(facts, tensors)
    spectrum = remembered(find, product, size, provenance, name, device=device)
    weight = _clip_weight(model, coverage, how, loss, whitener, rule, seed)
    rate = _rounded(learning_rate * weight)
    values, counts = spectrum.grouped()
    # where eta mu > 1 descent overshoots, and clipping alone keeps it from diverging
    capped = [min(_rounded(mu), 1 / rate) for mu in values]
    workload = NoiseCurve(tuple(capped), rate, tuple(map(float, counts)))
    origin: dict[str, Any] = {
        **spectrum.facts(),
        "matrix": settings.spectrum_matrix,
        "frame": "whitened" if framed else "parameters",
        "examples": how.size * how.batches,
        "clip_weight": weight,
        "overshooting": sum(mu * rate > 1 for mu in spectrum.positive),
    }
    return DesignedFor(workload, origin)


def _clip_weight(
    model: nn.Module,
    coverage: Coverage,
    how: Estimate,
    loss: PerExampleLoss,
    whitener: Whitener,
    rule: ClippingRule,
    seed: int,
) -> float:
    """Mean weight of a probe's examples: how much of the gradient clipping leaves."""
    generator = torch.Generator().manual_seed(seed)
    ios = probe_pass(model, coverage.covered, how, loss, generator)
    norms = torch.stack([whitener.sq_norms(io) for io in ios])
    return _rounded(float(rule.weights(norms).mean()))


def _together(probe: Provenance, frame: Provenance | None) -> Provenance:
    """The one that promises less."""
    order = (
        Provenance.SYNTHETIC,
        Provenance.RELEASED,
        Provenance.PUBLIC,
        Provenance.ORACLE,
    )
    return max((probe, frame or probe), key=order.index)


def _rounded(x: float) -> float:
    return float(f"{x:.{_DIGITS}g}")
