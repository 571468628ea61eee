"""Subspace maps on every kind of net: identities, norms and sums of both parts."""

import pytest
import torch
from nets import composed

from curvedp.barrier import Provenance
from curvedp.clipping import FlatClipping, clipped_sum
from curvedp.curvature import Factors, factors_from_state, factors_state, spectral
from curvedp.curvature.sketch import orthonormal, sketch_of
from curvedp.errors import ConfigurationError
from curvedp.testing import check_whitener
from curvedp.testing.reference import embedded_sums
from curvedp.whitening import KroneckerWhitening, SubspaceWhitening, parts_of

from .maps import factors, layer_ios, recorded, trainable

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)

SIZE = 5
NETS = [n for n in composed() if sum(p.numel() for p in n.make().parameters()) < 1500]
NETS = NETS[:: max(1, len(NETS) // 12)]


def sketches(ios, basis=6):
    layers = {}
    for io in ios:
        layers |= sketch_of(io, basis)
    return Factors(layers, Provenance.SYNTHETIC)


@pytest.mark.parametrize("net", NETS, ids=str)
def test_the_map_keeps_the_identities_and_its_parts_the_definition(net):
    model, coverage, probe = recorded(net, 12, seed=1)
    parameters = trainable(model)
    whitener = SubspaceWhitening(0.5, 0.3).build(sketches(probe), parameters)
    batch = net.batch(SIZE, torch.Generator().manual_seed(9))
    ios = layer_ios(model, coverage, batch, SIZE, keep_inputs=False)
    check_whitener(whitener, parameters, ios)
    grads = {n: torch.zeros(SIZE, *p.shape) for n, p in parameters.items()}
    for io in ios:
        grads |= io.per_example()
    inside = parts_of(whitener)[0].whitener
    norms = torch.stack([inside.sq_norms(io) for io in ios]).sum(0)
    bound = float(norms.sqrt().median())
    total = clipped_sum(
        ios, FlatClipping(bound), whitener, parameters=parameters,
        present=torch.ones(SIZE, dtype=torch.bool), step=0,
    )  # fmt: skip
    bases = [(own.names, own.basis) for own in whitener.maps]
    expected = embedded_sums(grads, bases, bound, 0.5 * bound)
    found = whitener.inverse({n: v.double() for n, v in total.values.items()})
    for name, value in found.items():
        wanted = expected[0][name] + expected[1][name]
        error = float((value - wanted).norm())
        assert error <= 1e-4 * float(wanted.norm()) + 1e-6 * bound


def test_a_basis_finds_where_gradients_lie():
    torch.manual_seed(0)
    directions = torch.linalg.qr(torch.randn(30, 4, dtype=torch.float64))[0]
    rows = torch.randn(200, 4, dtype=torch.float64) @ directions.T
    sketch = rows.T @ (rows @ torch.randn(30, 4, dtype=torch.float64))
    q = orthonormal(sketch)
    torch.testing.assert_close(q @ q.T, directions @ directions.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_basis_is_orthonormal_whatever_the_sketch(rank):
    left, right = torch.randn(20, rank), torch.randn(rank, 6)
    scales = torch.logspace(-150, 150, 6, dtype=torch.float64)
    q = orthonormal((left @ right).double() * scales)
    torch.testing.assert_close(q.T @ q, torch.eye(6).double(), rtol=0, atol=1e-12)


def test_sketches_merge_and_are_stored():
    net = NETS[0]
    model, coverage, _ = recorded(net, 12, seed=1)
    parts = []
    batches = [net.batch(6, torch.Generator().manual_seed(s)) for s in (1, 2)]
    for batch in batches:
        parts.append(sketches(layer_ios(model, coverage, batch, 6, True)))
    merged = parts[0].scaled(0.25) + parts[1].scaled(0.75)
    again = factors_from_state(factors_state(merged))
    for name, factor in merged.layers.items():
        one, other = (p.layers[name].sketch for p in parts)
        torch.testing.assert_close(factor.sketch, 0.25 * one + 0.75 * other)
        assert torch.equal(again.layers[name].sketch, factor.sketch)
        assert again.layers[name].shapes == factor.shapes


def test_factors_and_sketches_are_not_taken_for_each_other():
    model, _, probe = recorded(NETS[0], 12, seed=1)
    parameters = trainable(model)
    with pytest.raises(ConfigurationError, match="eigenvalues"):
        KroneckerWhitening().build(sketches(probe), parameters)
    with pytest.raises(ConfigurationError, match="sketches"):
        SubspaceWhitening().build(factors(probe), parameters)
    with pytest.raises(ConfigurationError, match="residual_share"):
        SubspaceWhitening(1.0, 1.0)
    with pytest.raises(ConfigurationError, match="residual_clip"):
        SubspaceWhitening(0.0)
    assert spectral(next(iter(factors(probe).layers.values()))) is not None
