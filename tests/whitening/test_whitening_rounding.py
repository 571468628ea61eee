"""The bound after rounding, for gradients that lie where a map shrinks most."""

import math

import pytest
import torch

from curvedp.clipping import FlatClipping, NormalisedClipping, bounded
from curvedp.clipping.bounded import clipped_sum
from curvedp.curvature import SecondMoment
from curvedp.layers import precision, rounding
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.layers.precision import NormPrecision
from curvedp.whitening import (
    Damping,
    DiagonalMap,
    JointMap,
    KroneckerMap,
    LayerwiseWhitener,
    damped_root,
    maps,
)
from curvedp.whitening import diagonal as diagonal_maps
from curvedp.whitening.roots import DiagonalRoot, FullRoot, IdentityRoot

P, R = 40, 6
SHAPE = torch.Size((R, P))


def steep(damping):
    """A root that shrinks one direction by ``damping^-1/2`` against the others."""
    direction = torch.nn.functional.normalize(
        torch.randn(P, dtype=torch.float64), dim=0
    )
    moment = SecondMoment(1.0, matrix=torch.outer(direction, direction).unsqueeze(0))
    return damped_root(moment, 0.5, Damping(damping), rank=1), direction


def whiteners(damping):
    root, direction = steep(damping)
    kronecker = KroneckerMap("w", None, SHAPE, 1, IdentityRoot(), root)
    joint = JointMap(
        "w", None, SHAPE, 1,
        direction.reshape(1, P, 1), torch.ones(1, 1, dtype=torch.float64),
        torch.eye(R, dtype=torch.float64).unsqueeze(0),
        torch.ones(1, R, dtype=torch.float64), damping,
    )  # fmt: skip
    return {"kronecker": kronecker, "joint": joint}, direction


def contribution(whitener, io, rule, norms=NormPrecision.WIDE):
    total = clipped_sum(
        [io],
        rule,
        LayerwiseWhitener([whitener], ["w"]),
        parameters={"w": torch.zeros(SHAPE)},
        present=torch.ones(io.batch_size, dtype=torch.bool),
        step=0,
        norms=norms,
    )
    return float(total.values["w"].double().norm()) / rule.bound


def forms(direction):
    """One example, whose gradient is along the steep direction, in every form."""
    d = torch.randn(1, 1, R)
    a = (1e4 * direction).float().reshape(1, 1, P)
    geometry = LinearGeometry(SHAPE)
    single = DenseIO("l", "w", None, [(a, d)], geometry)
    yield single
    yield DirectIO("l", single.per_example())
    many = (a.expand(1, 30, P).contiguous(), torch.randn(1, 30, R))
    for method in NormMethod:
        yield DenseIO("l", "w", None, [many], geometry, method)


@pytest.mark.parametrize("kind", ["kronecker", "joint"])
@pytest.mark.parametrize("damping", [1e-2, 1e-6, 1e-10])
def test_rounding_that_a_map_stretches_is_within_the_bound(kind, damping):
    for seed in range(5):
        torch.manual_seed(seed)
        found, direction = whiteners(damping)
        for io in forms(direction):
            for rule in (FlatClipping(1.0), NormalisedClipping(1.0)):
                assert contribution(found[kind], io, rule) <= 1 + 1e-6


def test_a_sum_in_float32_would_break_the_bound(monkeypatch):
    monkeypatch.setattr(LayerwiseWhitener, "sum_dtype", lambda self, io: None)
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    monkeypatch.setattr(bounded, "kept_of_bound", lambda *_: 1.0)
    worst = 0.0
    for seed in range(5):
        torch.manual_seed(seed)
        found, direction = whiteners(1e-10)
        for io in forms(direction):
            worst = max(worst, contribution(found["kronecker"], io, FlatClipping(1.0)))
    assert worst > 1 + 1e-4


@pytest.mark.parametrize("norms", [NormPrecision.FLOAT32, NormPrecision.BF16])
def test_where_all_is_float32_the_allowance_keeps_it(norms):
    for seed in range(5):
        torch.manual_seed(seed)
        found, direction = whiteners(1e-6)
        for whitener in found.values():
            for io in forms(direction):
                assert contribution(whitener, io, FlatClipping(1.0), norms) <= 1 + 1e-6


def test_diagonal_maps_and_tables_too():
    torch.manual_seed(0)
    scales = torch.logspace(-5, 5, R * P, dtype=torch.float64).reshape(SHAPE)
    g = torch.zeros(1, *SHAPE)
    g[0, 0, 0] = 1e8 / 3
    g[0, -1, -1] = 1e-4
    diagonal = DiagonalMap({"w": scales})
    assert (
        contribution(diagonal, DirectIO("l", {"w": g}), FlatClipping(1.0)) <= 1 + 1e-6
    )
    left = DiagonalRoot(torch.logspace(-3, 3, R, dtype=torch.float64))
    table = KroneckerMap("w", None, SHAPE, 1, left, steep(1e-8)[0])
    ids, d = torch.randint(0, R, (1, 50)), torch.randn(1, 50, P)
    lookup = LookupIO("l", "w", R, None, [(ids, d)])
    assert contribution(table, lookup, FlatClipping(1.0)) <= 1 + 1e-6


def test_ordinary_gradients_are_hardly_touched():
    torch.manual_seed(0)
    found, _ = whiteners(0.05)
    io = DirectIO("l", {"w": torch.randn(20, *SHAPE)})
    for whitener in found.values():
        matrix = LayerwiseWhitener([whitener], ["w"]).materialize(
            {"w": torch.zeros(SHAPE)}
        )
        true = (io.grads["w"].flatten(1).double() @ matrix.T).norm(dim=1)
        ratio = whitener.sq_norms(io).sqrt() / true
        assert torch.all(ratio >= 1)
        assert float(ratio.max()) <= 1 + 1e-4
        assert math.isfinite(float(ratio.max()))


@pytest.mark.parametrize("largest", [1.5, 1e5])
def test_terms_that_cancel_in_float32_count_in_a_diagonal_map(largest):
    """``1e8 + 1 - 1e8`` is 0 in float32 and 1 in the float64 sum."""
    a = torch.ones(1, 3, P)
    d = torch.tensor([1e8, 1, -1e8]).reshape(1, 3, 1).expand(1, 3, R).contiguous()
    diagonal = DiagonalMap({"w": torch.full(SHAPE, largest, dtype=torch.float64)})
    io = DenseIO("l", "w", None, [(a, d)], LinearGeometry(SHAPE))
    assert float(io.per_example()["w"].abs().max()) == 0.0
    for bound in (1e-3, 1.0):
        reached = contribution(diagonal, io, FlatClipping(bound))
        assert 0.9 < reached <= 1 + 1e-6


def test_repeated_tokens_that_cancel_count_in_a_diagonal_map():
    ids = torch.zeros(1, 3, dtype=torch.int64)
    d = torch.tensor([1e8, 1, -1e8]).reshape(1, 3, 1).expand(1, 3, P).contiguous()
    diagonal = DiagonalMap({"w": torch.full(SHAPE, 2.0, dtype=torch.float64)})
    io = LookupIO("l", "w", R, None, [(ids, d)])
    assert 0.9 < contribution(diagonal, io, FlatClipping(1e-3)) <= 1 + 1e-6


def test_a_small_output_gradient_does_not_vanish_beside_a_large_input(monkeypatch):
    """In float32 ``d^2`` of 1e-30 is zero, and the gradient is not."""
    monkeypatch.setattr(diagonal_maps, "norm_dtype", precision.compute_dtype)
    a, d = torch.full((2, 1, P), 1e29), torch.full((2, 1, R), 1e-27)
    d[1] = 0.0
    diagonal = DiagonalMap({"w": torch.full(SHAPE, 2.0, dtype=torch.float64)})
    io = DenseIO("l", "w", None, [(a, d)], LinearGeometry(SHAPE))
    true = float(2 * torch.full((), 1e-27).double() * 1e29) * math.sqrt(P * R)
    found = diagonal.sq_norms(io).sqrt()
    assert true <= float(found[0]) <= true * (1 + 1e-4)
    assert float(found[1]) == 0.0


def root_that_float32_takes_for_singular():
    """``I + H / sqrt(n)`` and a bit in the direction x, where that is zero.

    H is a Hadamard matrix, ``H x = -sqrt(n) x`` with entries of 1 and -1. The bit is
    below half a digit of every entry: it is gone in float32, and its length is n bits.
    """
    h = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    below, above = torch.tensor([1, -1, -1, -1]), torch.tensor([1, 1, 1, -1])
    matrix, x = h.double(), below.double()
    for _ in range(5):
        matrix, x = torch.kron(matrix, h.double()), torch.kron(x, above.double())
    n = len(x)
    matrix = matrix / n**0.5
    assert torch.equal(matrix @ x, -x)
    matrix += torch.eye(n, dtype=torch.float64)
    matrix += 0.49 * 2.0**-30 * torch.outer(x, x)
    root = FullRoot(torch.zeros(1, 1, 1).expand(1, n, n), torch.full((1, n), 2.0))
    root.__dict__["_matrix"] = matrix.unsqueeze(0)  # eigenvectors would take a minute
    return root, x.float()


def test_rounding_of_the_map_is_counted(monkeypatch):
    root, x = root_that_float32_takes_for_singular()
    shape = torch.Size((1, len(x)))
    own = KroneckerMap("w", None, shape, 1, IdentityRoot(), root)
    pair = (x.reshape(1, 1, -1), torch.full((1, 1, 1), 1e6))
    io = DenseIO("l", "w", None, [pair], LinearGeometry(shape))

    def added_up(norms):
        total = clipped_sum(
            [io],
            FlatClipping(1.0),
            LayerwiseWhitener([own], ["w"]),
            parameters={"w": torch.zeros(shape)},
            present=torch.ones(1, dtype=torch.bool),
            step=0,
            norms=norms,
        )
        return float(total.values["w"].double().norm())

    assert 0.99 <= added_up(NormPrecision.WIDE) <= 1 + 1e-6
    assert added_up(NormPrecision.FLOAT32) <= 1 + 1e-6
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    assert added_up(NormPrecision.FLOAT32) <= 1 + 1e-6
    monkeypatch.setattr(maps, "map_rounding", lambda *_: 0.0)
    assert added_up(NormPrecision.FLOAT32) > 1.5
