"""Cosine, relative error, error at equal trace: as defined, on known matrices."""

import math

import pytest
import torch

from curvedp.barrier import Provenance
from curvedp.curvature import (
    DenseFactor,
    DiagonalFactor,
    Factors,
    LookupFactor,
    SecondMoment,
)
from curvedp.diagnostics.geometry import alignment, identity_factors
from curvedp.errors import ConfigurationError
from tests.diagnostics.geometry.nets import sources, study


def psd(*shape, seed):
    x = torch.randn(*shape, dtype=torch.float64, generator=generator(seed))
    return x @ x.mT


def generator(seed):
    return torch.Generator().manual_seed(seed)


def dense(a, g):
    moments = [SecondMoment(2.0, matrix=2 * m) for m in (a, g)]
    return DenseFactor("w", "b", *moments)


def factors(**layers):
    return Factors(layers, Provenance.SYNTHETIC)


def expected(c, o):
    """The definitions of the docstring on whole matrices."""
    equal = c * o.trace() / c.trace()
    return (
        float((c * o).sum() / (c.norm() * o.norm())),
        float((c - o).norm() / o.norm()),
        float((equal - o).norm() / o.norm()),
    )


def test_rows_are_those_of_the_written_out_kronecker_product():
    groups = 2
    a, oa = psd(groups, 5, 5, seed=0), psd(groups, 5, 5, seed=1)
    g, og = psd(groups, 3, 3, seed=2), psd(groups, 3, 3, seed=3)
    rows = alignment(factors(w=dense(a, g)), factors(w=dense(oa, og)))
    assert [row.factor for row in rows] == ["A", "G", "F"]

    def block(left, right=None):
        parts = left if right is None else map(torch.kron, left, right)
        return torch.block_diag(*parts)

    for row, c, o in zip(
        rows,
        (block(a), block(g), block(a, g)),
        (block(oa), block(og), block(oa, og)),
        strict=True,
    ):
        got = (row.cosine, row.relative_error, row.shape_error)
        assert got == pytest.approx(expected(c, o), rel=1e-9)


def test_the_cosine_of_a_product_is_the_product_of_cosines():
    mine = factors(w=dense(psd(1, 4, 4, seed=0), psd(1, 3, 3, seed=1)))
    oracle = factors(w=dense(psd(1, 4, 4, seed=2), psd(1, 3, 3, seed=3)))
    a, g, f = (row.cosine for row in alignment(mine, oracle))
    assert f == pytest.approx(a * g)


def test_equal_factors_and_scaled_ones():
    mine = factors(w=dense(psd(1, 4, 4, seed=0), psd(1, 3, 3, seed=1)))
    for row in alignment(mine, mine):
        assert row.cosine == pytest.approx(1)
        assert row.relative_error == pytest.approx(0, abs=1e-7)
    layer = mine.layers["w"]
    twice = factors(w=dense(2 * layer.a.mean(), layer.g.mean()))
    row = alignment(twice, mine)[0]
    assert (row.cosine, row.relative_error) == pytest.approx((1, 1))
    assert row.shape_error == pytest.approx(0, abs=1e-7)


def test_embeddings_norm_layers_and_layers_without_a_gradient():
    g = SecondMoment(1.0, matrix=psd(1, 2, 2, seed=0))
    mine = factors(
        e=LookupFactor("e", torch.tensor([3.0, 1.0, 0.0]), 4.0, g),
        n=DiagonalFactor({"n": torch.tensor([1.0, 0.0])}, 1.0),
        z=DiagonalFactor({"z": torch.zeros(2)}, 1.0),
    )
    oracle = factors(
        e=LookupFactor("e", torch.tensor([0.0, 2.0, 2.0]), 4.0, g),
        n=DiagonalFactor({"n": torch.tensor([2.0, 2.0])}, 2.0),
        z=DiagonalFactor({"z": torch.ones(2)}, 1.0),
    )
    rows = {(r.layer, r.factor): r for r in alignment(mine, oracle)}
    assert rows["e", "A"].cosine == pytest.approx(2 / (10**0.5 * 8**0.5))
    assert rows["e", "G"].cosine == pytest.approx(1)
    assert rows["n", "diagonal"].cosine == pytest.approx(2**-0.5)
    assert rows["n", "diagonal"].relative_error == pytest.approx(2**-0.5)
    assert math.isnan(rows["z", "diagonal"].cosine)
    assert rows["z", "diagonal"].relative_error == 1
    assert math.isnan(rows["z", "diagonal"].shape_error)


def test_identity_has_the_trace_over_the_norm():
    a = psd(1, 6, 6, seed=4)[0]
    oracle = factors(w=dense(a[None], psd(1, 3, 3, seed=5)))
    row = alignment(identity_factors(oracle), oracle)[0]
    assert row.cosine == pytest.approx(float(a.trace() / (6**0.5 * a.norm())))
    assert identity_factors(oracle).provenance.is_public


def test_other_layers_are_refused():
    one = factors(w=dense(psd(1, 2, 2, seed=0), psd(1, 2, 2, seed=1)))
    with pytest.raises(ConfigurationError, match="different layers"):
        alignment(one, Factors({"v": one.layers["w"]}, one.provenance))


def test_on_digits_coloured_noise_is_nearer_to_the_data_than_nothing():
    of = study()
    found = sources(of)
    assert list(found) == ["oracle", "synthetic", "white"]
    assert [found[n].private for n in found] == [False, True, True]
    oracle = of.factors(found["oracle"])
    assert not oracle.provenance.is_public
    cosines = {
        name: next(r for r in alignment(f, oracle) if r.factor == "A").cosine
        for name, f in {
            "identity": identity_factors(oracle),
            "synthetic": of.factors(found["synthetic"]),
            "again": of.factors(found["oracle"], seed=1),
        }.items()
    }
    assert cosines["identity"] < cosines["synthetic"] < cosines["again"]
    assert cosines["again"] > 0.95
