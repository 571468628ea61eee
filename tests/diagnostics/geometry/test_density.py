"""Lanczos quadrature and Hessian products against dense matrices."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from curvedp.diagnostics.geometry import (
    Density,
    hessian_density,
    hessian_product,
    lanczos_density,
)
from curvedp.errors import ConfigurationError
from curvedp.models import build
from curvedp.probes import draw
from curvedp.recipes import Curvature
from tests.diagnostics.geometry.nets import cnn, sources, study


def symmetric(n, seed=0):
    x = torch.randn(
        n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return (x + x.mT) / 2


def test_as_many_steps_as_dimensions_give_all_eigenvalues():
    matrix = symmetric(12)
    density = lanczos_density(lambda v: matrix @ v, 12, steps=12, vectors=1)
    assert torch.allclose(density.nodes, torch.linalg.eigvalsh(matrix), atol=1e-10)
    assert float(density.weights.sum()) == pytest.approx(1)
    assert density.moment(2) == pytest.approx(
        float(_start(12) @ matrix @ matrix @ _start(12))
    )


def _start(n):
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return signs.double() / n**0.5


def test_few_steps_are_exact_for_polynomials_of_low_degree():
    matrix, start = symmetric(40), _start(40)
    density = lanczos_density(lambda v: matrix @ v, 40, steps=5, vectors=1)
    image = start
    for power in range(1, 10):
        image = matrix @ image
        assert density.moment(power) == pytest.approx(float(start @ image), rel=1e-9)


def test_repeated_eigenvalues_end_the_run_early():
    density = lanczos_density(lambda v: 2 * v, 6, steps=5, vectors=3)
    assert density.nodes.tolist() == pytest.approx([2, 2, 2])
    magnitudes, ranks = density.ranked()
    assert float(ranks[-1]) == pytest.approx(6)
    assert magnitudes.tolist() == pytest.approx([2, 2, 2])
    points = torch.linspace(-1, 5, 601)
    area = torch.trapezoid(density.at(points, 0.2), points.double())
    assert float(area) == pytest.approx(1, abs=1e-6)


def test_nothing_to_compute_is_refused():
    with pytest.raises(ConfigurationError, match="0 steps"):
        lanczos_density(lambda v: v, 3, steps=0)


def dense_hessian(of, source, seed=0):
    """The whole matrix, by torch.func, on the same draws."""
    generator = torch.Generator().manual_seed(seed)
    model = of.model.double().eval()
    names = list(of.parameters)
    shapes = [of.parameters[n].shape for n in names]
    flat = torch.cat([of.parameters[n].flatten() for n in names])
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for _ in range(source.how.batches):
        drawn = draw(source.how.probe, source.how.labels, source.how.size, generator)
        x = drawn.inputs.double()
        with torch.no_grad():
            y = drawn.targets(model(x).float())

        def mean_loss(vector, x=x, y=y):
            parts = torch.split(vector, [s.numel() for s in shapes])
            zipped = zip(names, parts, shapes, strict=True)
            values = {n: p.reshape(s) for n, p, s in zipped}
            return of.loss(functional_call(model, values, (x,)), y).mean()

        total += hessian(mean_loss, flat)
    return total / source.how.batches


def tiny():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, 10)
    )


@pytest.mark.parametrize("name", ["oracle", "synthetic"])
def test_against_the_dense_hessian(name):
    of = study(tiny())
    source = sources(of, Curvature(probe_size=24, probe_batches=2))[name]
    before = [m.training for m in of.model.modules()]
    product = hessian_product(of, source)
    density = hessian_density(of, source, steps=30, vectors=20)
    assert [m.training for m in of.model.modules()] == before
    assert all(p.grad is None for p in of.model.parameters())
    exact = dense_hessian(of, source)
    v = torch.randn(
        len(exact), dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    assert torch.allclose(product(v), exact @ v, atol=1e-9)
    values = torch.linalg.eigvalsh(exact)
    assert float(density.nodes[-1]) == pytest.approx(float(values[-1]), rel=1e-6)
    assert float(density.nodes[0]) == pytest.approx(float(values[0]), rel=1e-6)
    # of v^T H v with random signs the variance is 2 (||H||_F^2 - sum of diagonal^2)
    off = float(exact.square().sum() - exact.diagonal().square().sum())
    error = (2 * off / 20) ** 0.5 / len(values)
    assert density.moment(1) == pytest.approx(float(values.mean()), abs=4 * error)
    reach = float(values[-1] - values[0])
    points = torch.linspace(
        float(values[0]) - reach, float(values[-1]) + reach, 2000, dtype=torch.float64
    )
    truth = Density(values, torch.full_like(values, 1 / len(values)), len(values))
    width = reach / 50
    apart = (density.at(points, width) - truth.at(points, width)).abs()
    assert float(torch.trapezoid(apart, points)) < 0.1  # of at most 2
    # most eigenvalues are near zero, closer together than 30 steps can tell apart
    ends = torch.tensor([-reach / 20, reach / 20], dtype=torch.float64)
    assert torch.allclose(density.cumulative(ends), truth.cumulative(ends), atol=0.05)


def test_dead_parameters_and_attention():
    model = build("vit", (1, 8, 8), 10)
    of = study(model)
    source = sources(of, Curvature(probe_size=4, probe_batches=1))["synthetic"]
    density = hessian_density(of, source, steps=3, vectors=1)
    assert bool(torch.isfinite(density.nodes).all())


def test_it_leaves_the_models_precision_alone():
    model = cnn()
    of = study(model)
    source = sources(of, Curvature(probe_size=8, probe_batches=1))["white"]
    hessian_density(of, source, steps=2, vectors=1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
