"""A few eigenpairs of many, found by iteration, against all of them."""

import pytest
import torch

from curvedp.curvature import SecondMoment
from curvedp.whitening.damping import Damping, damped_root

N, K = 300, 32


def moment(power, *, rows, groups=1):
    """Eigenvalues ``j^-power``; as rows, only the first 250 are not zero."""
    generator = torch.Generator().manual_seed(4)
    square = torch.randn(groups, N, N, generator=generator, dtype=torch.float64)
    basis, _ = torch.linalg.qr(square)
    values = torch.arange(1, N + 1, dtype=torch.float64) ** -power
    scaled = values.sqrt().unsqueeze(-1) * basis.mT
    if rows:
        return SecondMoment(2.0, rows=scaled[:, :250])
    return SecondMoment(2.0, matrix=scaled.mT @ scaled)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_leading_pairs_are_those_of_the_whole_spectrum(power, groups, rows):
    own = moment(power, rows=rows, groups=groups)
    whole, found = own.spectrum(), own.spectrum(K)
    assert found.values.shape == (groups, K)
    assert torch.allclose(found.values[:, :8], whole.values[:, :8], rtol=1e-6)
    # those at the edge may be mixed with their neighbours
    exact = whole.values[:, :K].sum(-1)
    assert torch.all(found.values.sum(-1) <= exact * (1 + 1e-12))
    assert torch.all(found.values.sum(-1) >= exact * (1 - 1e-4))
    assert torch.allclose(found.trace, whole.trace)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("power", [0.0, 1.0, 3.0])
def test_leading_pairs_are_pairs(power, rows):
    own = moment(power, rows=rows)
    found = own.spectrum(K)
    gram = found.vectors.mT @ found.vectors
    assert torch.allclose(gram, torch.eye(K, dtype=torch.float64), atol=1e-12)
    inside = (found.vectors.mT @ own.mean() @ found.vectors).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(inside, found.values, rtol=1e-10)
    assert torch.equal(own.spectrum(K).vectors, found.vectors)  # nothing is drawn


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_the_root_is_nearly_that_of_the_exact_pairs(power):
    own = moment(power, rows=False)
    values, vectors = torch.linalg.eigh(own.mean())
    values, q = values.flip(-1)[..., :K], vectors.flip(-1)[..., :K]
    mean, damping = own.trace() / N, Damping(0.05)
    rest = (own.trace() - values.sum(-1)) / (N - K)
    tail = damping.of(rest, mean) ** -0.5
    kept = damping.of(values, mean[:, None]) ** -0.5
    exact = torch.eye(N, dtype=torch.float64) * tail + (q * (kept - tail)) @ q.mT
    root = damped_root(own, 0.5, damping, K)
    found = root.times(torch.eye(N, dtype=torch.float64).unsqueeze(0))
    assert float((found - exact).norm() / exact.norm()) < 5e-3
