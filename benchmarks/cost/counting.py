"""What whitening takes beside a layer's own pass: counted, and timed where cheap."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import nn

from cost.contestants import clock, private
from curvedp.layers import Recording, as_call
from curvedp.layers.dense import DenseIO
from curvedp.layers.precision import exact

__all__ = ["counted", "timed"]

#: Few probes: shapes are all that counts are made from.
_PROBING = {"probe_size": 32, "probe_batches": 1}
ROUNDS = 7


def counted(net, rows=2):
    """The worst layer of a net under dp-kfc at the net's batch, and all together.

    The blocks of a transformer of twelve are all alike: one of them is asked.
    """
    x, y = net.data("cpu")
    depth = net.options.get("depth", 1)
    one = replace(net, options={**net.options, "depth": 1}) if depth > 1 else net
    own = private(one.model(), x[:rows], y[:rows], "dp-kfc", **_PROBING)
    plan = own.explain()
    rows_of = [
        {
            "layer": row.name,
            "shape": None
            if row.shape is None
            else [row.shape.positions, row.shape.inputs, row.shape.outputs],
            "norms": row.norms,
            "inputs": row.inputs,
            "pass_flops": net.batch * row.forward_backward.flops + row.once.flops,
            "norm_flops": net.batch * row.norm.flops,
            "whitening_flops": net.batch * row.whitening.flops + row.mapping.flops,
        }
        for row in plan.rows
    ]
    for row in rows_of:
        row["whitening_over_pass"] = row["whitening_flops"] / row["pass_flops"]
    worst = max(rows_of, key=lambda row: row["whitening_over_pass"])
    total = {
        key: sum(
            row[key] * (depth if "blocks." in row["layer"] else 1) for row in rows_of
        )
        for key in ("pass_flops", "norm_flops", "whitening_flops")
    }
    return {"net": net.name, "batch": net.batch, "worst": worst, "total": total}


def _times(row, depth):
    return depth if row["layer"].startswith("blocks.") else 1


def timed(net):
    """Per dense layer: seconds of whitening over those of forward and backward.

    Whitening is the mapped norms less the plain ones, and the map of the sum; the pass
    is the module's own on what it saw, with gradients of inputs and weights. Medians of
    rounds in which all of them take turns.
    """
    x, y = net.data("cpu")
    model = net.model()
    own = private(model, x, y, "dp-kfc", **_PROBING)
    whitener = own._engine.whiteners.at(0)
    covered = own._engine._coverage.covered
    recordings = []
    for kept in (True, False):
        recording = Recording(model, covered, len(x), keep_inputs=kept)
        output = recording.forward(*as_call(x))
        nn.functional.cross_entropy(output, y).backward()
        recordings.append(recording.layer_ios())
    found = []
    for whole, io in zip(*recordings, strict=True):
        if not isinstance(whole, DenseIO) or len(whole.calls) != 1:
            continue
        module = model.get_submodule(whole.name)
        sums = io.weighted_sum(torch.ones(len(x)))
        maps = whitener.maps_of(io)
        seen = {"mapped": [], "plain": [], "sum": [], "pass": []}
        for _ in range(ROUNDS):
            with exact(x.device):
                seen["mapped"].append(_seconds(x, lambda io=io: whitener.sq_norms(io)))
                seen["plain"].append(_seconds(x, lambda io=io: io.sq_norms()))
                for layer in maps:
                    seen["sum"].append(_seconds(x, lambda m=layer, s=sums: m.apply(s)))
            inputs = whole.calls[0][0].detach().requires_grad_()
            pair = (module, inputs, whole.calls[0][1])
            seen["pass"].append(_seconds(x, lambda p=pair: _pass(*p)))
        middle = {key: statistics.median(values) for key, values in seen.items()}
        extra = max(0.0, middle["mapped"] - middle["plain"]) + middle["sum"]
        found.append({"layer": whole.name, **middle, "ratio": extra / middle["pass"]})
    worst = max(found, key=lambda row: row["ratio"])
    return {"net": net.name, "batch": net.batch, "worst": worst, "layers": found}


def _pass(module, inputs, d):
    module(inputs).backward(d)


def _seconds(x, work):
    start = clock(x)
    work()
    return clock(x) - start
