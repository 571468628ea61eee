"""Reduced precision elsewhere (autocast, TF32, bfloat16) does not reach the norms."""

from dataclasses import replace

import pytest
import torch
from passes import in_float64
from torch import nn

from curvedp.clipping import FlatClipping
from curvedp.clipping.bounded import clipped_sum
from curvedp.layers import Batch, Recording, cover, precision
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.precision import exact
from curvedp.whitening import IdentityWhitener

#: The bound holds up to the rounding of the measurement's float32 inputs.
SLACK = 1e-6


def precisions():
    backends = torch.backends
    names = ["cuda.matmul", "mkldnn.matmul", "mkldnn.conv", "cudnn.conv"]
    found = {}
    for name in names:
        switch = backends
        for part in name.split("."):
            switch = getattr(switch, part)
        found[name] = switch.fp32_precision
    return found


def restore_precision():
    torch.set_float32_matmul_precision("highest")
    for name in ("mkldnn", "cuda"):
        getattr(torch.backends, name).matmul.fp32_precision = "none"


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="switches per backend came with torch 2.9",
)
@pytest.mark.parametrize(
    "switch_on",
    [
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    ],
    ids=["medium", "high", "mkldnn-bf16", "cuda-tf32"],
)
def test_reduced_precision_products_are_off_inside_and_back_after(switch_on):
    try:
        switch_on()
        before = precisions()
        assert {"tf32", "bf16"} & set(before.values())
        with precision._true_float32("cuda"):
            assert set(precisions().values()) == {"ieee"}
        assert precisions() == before
        with exact(torch.device("cpu")):
            on_cpu = {n: p for n, p in precisions().items() if "mkldnn" in n}
            assert set(on_cpu.values()) == {"ieee"}
        assert precisions() == before
        with pytest.raises(ZeroDivisionError), exact(torch.device("cpu")):
            raise ZeroDivisionError
        assert precisions() == before
    finally:
        restore_precision()


def test_autocast_and_autograd_are_off_inside():
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with exact(torch.device("cpu")):
            y = x @ x
            assert y.dtype == torch.float32
            assert not y.requires_grad
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize("method", [None, *NormMethod])
def test_norms_of_a_model_under_autocast_are_true_float32(method):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    def synthesise(size, generator):
        return Batch(torch.randn(size, 5, 6, generator=generator), None)

    coverage = cover(model, synthesise)
    x = torch.randn(4, 5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recording = Recording(model, coverage.covered, 4, keep_inputs=True)
        output = recording.forward((x,), {})
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        ios = recording.layer_ios()
        for io in ios:
            assert isinstance(io, DenseIO)
            io = replace(io, method=method)
            with exact(torch.device("cpu")):
                given_norms = io.sq_norms()
            assert given_norms.dtype == torch.float64
            true = sum(g.flatten(1).square().sum(1) for g in in_float64(io).values())
            # bfloat16 products would be off in the third digit, and what is allowed for
            # the rounding of the sum is in the sixth
            assert torch.all((given_norms / true - 1).abs() < 1e-5)
            assert torch.all(given_norms >= true * (1 - SLACK))
        total = clipped_sum(
            ios,
            FlatClipping(0.5),
            IdentityWhitener(),
            parameters=dict(model.named_parameters()),
            present=torch.ones(4, dtype=torch.bool),
            step=0,
        )
    assert all(v.dtype == torch.float32 for v in total.values.values())
