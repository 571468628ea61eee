"""DP-NGD's map, and floors and scales that are matched, against written-out maps."""

import math

import pytest
import torch
from nets import ALL

from curvedp.barrier import Provenance
from curvedp.curvature import DenseFactor, Factors, LookupFactor, SecondMoment
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.layers.linear import LinearGeometry
from curvedp.whitening import Damping, JointMap, JointWhitening, KroneckerWhitening

from .maps import factors, recorded, trainable

P, R = 9, 5
SHAPE = torch.Size((R, P))
FLOORS = [1e-30, 1e-12, 1e-3]


def normal(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def moment(size, spread, seed):
    """Of full rank, with eigenvalues from 1 down to ``1 / spread``."""
    basis = torch.linalg.qr(normal(1, size, size, seed=seed))[0]
    values = torch.logspace(0, -math.log10(spread), size, dtype=torch.float64)
    return SecondMoment(1.0, matrix=(basis * values) @ basis.mT)


# -- full bases ------------------------------------------------------------------------


def full_joint_map(floor):
    a, g = moment(P, 10.0, seed=1).spectrum(), moment(R, 10.0, seed=2).spectrum()
    return JointMap(
        "w", None, SHAPE, 1, a.vectors, a.values, g.vectors, g.values, floor
    )


def forms(positions):
    """Gradients of six examples in every form in which a layer may have them."""
    a, d = normal(6, positions, P, seed=3), normal(6, positions, R, seed=4)
    for method in (None, *NormMethod):
        yield DenseIO("l", "w", None, [(a, d)], LinearGeometry(SHAPE), method)
    yield DirectIO("l", {"w": d.mT @ a})


@pytest.mark.parametrize("floor", FLOORS)
def test_a_full_joint_map_is_undone_by_its_inverse(floor):
    whitened = full_joint_map(floor)
    g = {"w": normal(R, P, seed=5)}
    for there, back in (
        (whitened.apply, whitened.inverse),
        (whitened.inverse, whitened.apply),
    ):
        assert torch.allclose(back(there(g))["w"], g["w"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("positions", [1, 3])
def test_norms_of_a_full_joint_map_are_those_of_its_images(floor, positions):
    whitened = full_joint_map(floor)
    a, g = whitened.input_values, whitened.output_values
    scales = (g.mT * a).clamp_min(floor) ** -0.5
    for io in forms(positions):
        rows = whitened.outputs[0].T @ io.per_example()["w"] @ whitened.inputs[0]
        true = (scales * rows).square().sum((1, 2))
        found = whitened.sq_norms(io)
        assert torch.all(found >= true)
        assert torch.allclose(found, true, rtol=1e-6)


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("inverse", [False, True])
def test_row_norms_of_a_full_joint_map_are_those_of_its_matrix(floor, inverse):
    whitened = full_joint_map(floor)
    entries = torch.eye(R * P, dtype=torch.float64).reshape(-1, R, P)
    way = whitened.inverse if inverse else whitened.apply
    images = [way({"w": entry})["w"].square().sum() for entry in entries]
    found = whitened.row_sq_norms({"w": entries[0]}, inverse=inverse)["w"]
    assert torch.allclose(found.flatten(), torch.stack(images), rtol=1e-9)


@pytest.mark.parametrize("floor", [1e-20, 1e-26, 1e-30])
def test_rounding_that_a_full_joint_map_stretches_is_in_its_norms(floor):
    """Of gradients along the one direction that the floor does not stretch."""
    a = moment(P, 10.0, seed=1).spectrum()
    g = moment(R, 10.0, seed=2).spectrum()
    only = torch.eye(P, dtype=torch.float64)[:1]
    whitened = JointMap(
        "w", None, SHAPE, 1, a.vectors, only, g.vectors, g.values, floor
    )
    along = (normal(40, 1, 1, seed=3) * a.vectors[0, :, 0]).expand(40, 1, P)
    io = DenseIO(
        "l", "w", None, [(along, normal(40, 1, R, seed=4))], LinearGeometry(SHAPE)
    )
    images = [whitened.apply({"w": one})["w"] for one in io.per_example()["w"]]
    true = torch.stack([image.square().sum() for image in images])
    assert torch.all(whitened.sq_norms(io) >= true)


# -- embeddings ------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.02, 0.3, 3.0])
def test_the_matched_floor_bounds_the_noise_of_embeddings_too(ratio):
    """``ratio^2 tr(P^2) / n <= 1``, over the parameters of a table and a head of one.

    The head alone has large eigenvalues, so a floor that is matched to it would let the
    rare tokens of the table be displaced without bound.
    """
    counts = torch.tensor([500.0, 80.0, 15.0, 4.0, 1.0, 0.0, 0.0, 0.0])
    small = moment(16, 100.0, seed=1).total() * 1e-3
    table = LookupFactor("e", counts, 600.0, SecondMoment(1.0, matrix=small))
    one = SecondMoment(1.0, matrix=torch.ones(1, 1, 1, dtype=torch.float64))
    head = DenseFactor("w", None, moment(16, 10.0, seed=2), one)
    found = Factors({"e": table, "w": head}, Provenance.SYNTHETIC)
    like = {
        "e": torch.zeros(8, 16, dtype=torch.float64),
        "w": torch.zeros(1, 16, dtype=torch.float64),
    }
    whitener = JointWhitening(ratio).build(found, like)
    matrix = whitener.materialize(like)
    displaced = ratio**2 * float(matrix.square().sum()) / len(matrix)
    assert displaced == pytest.approx(1.0, rel=1e-3)  # no more, and not much less


PROBED = {
    "relative": KroneckerWhitening(side="both"),
    "absolute": KroneckerWhitening(side="both", damping=Damping(0.01, relative=False)),
    "scaled": KroneckerWhitening(side="both", match_scale=True),
    "matched": JointWhitening(0.03),
    "printed": JointWhitening(0.03, matched=False),
}


@pytest.mark.parametrize("whitening", PROBED)
@pytest.mark.parametrize("times", [4.0, 1e-4])
def test_the_size_of_a_probe_does_not_change_the_map(whitening, times):
    """Factors are means, under absolute damping and of less than one token, too."""
    net = next(net for net in ALL if str(net) == "tokens-padding")
    model, _, probe = recorded(net, 12, seed=1)
    parameters = trainable(model)
    found = factors(probe)
    assert any(isinstance(factor, LookupFactor) for factor in found.layers.values())
    once, other = (
        PROBED[whitening].build(f, parameters).materialize(parameters)
        for f in (found, found.scaled(times))
    )
    assert torch.allclose(once, other, rtol=1e-3, atol=1e-3 * float(once.abs().max()))


# -- groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["a", "g", "both"])
def test_matched_scale_keeps_the_mean_square_of_groups_that_differ(side):
    """``tr(P^2 F) = tr(F)`` with F one Kronecker product for each group."""
    groups, p, r = 2, 4, 3
    strong = torch.tensor([1.0, 30.0], dtype=torch.float64).reshape(2, 1, 1)
    inputs = torch.cat([moment(p, s, seed=1).total() for s in (1.0, 100.0)]) * strong
    outputs = torch.cat([moment(r, s, seed=2).total() for s in (50.0, 2.0)]) * strong
    factor = DenseFactor(
        "w", None, SecondMoment(1.0, matrix=inputs), SecondMoment(1.0, matrix=outputs)
    )
    like = {"w": torch.zeros(groups * r, p, 1, 1, dtype=torch.float64)}
    found = Factors({"w": factor}, Provenance.SYNTHETIC)
    how = KroneckerWhitening(side=side, rank=None, match_scale=True)
    matrix = how.build(found, like).materialize(like)
    fisher = torch.block_diag(
        *(torch.kron(g, a) for g, a in zip(outputs, inputs, strict=True))
    )
    after = float((matrix @ fisher @ matrix.T).trace())
    assert after == pytest.approx(float(fisher.trace()), rel=1e-6)
