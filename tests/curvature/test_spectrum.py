"""Eigenvalues by Lanczos against dense matrices and curvlinops; the fitted tail."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from curvedp.barrier import Provenance
from curvedp.curvature import (
    CurvatureSpectrum,
    Estimate,
    Tail,
    curvature_product,
    curvature_spectrum,
    estimate,
    fit_tail,
    fit_tail_to_sum,
    in_frame,
    lanczos_density,
    probe_batches,
    top_eigenvalues,
)
from curvedp.errors import ConfigurationError
from curvedp.layers import cover, synthesiser_like
from curvedp.layers.synthetic import Batch
from curvedp.probes import ImageProbe, ModelLabels
from curvedp.whitening import KroneckerWhitening


def loss(output, targets):
    return nn.functional.cross_entropy(output, targets, reduction="none")


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(), nn.Linear(32, 3)
    )


HOW = Estimate(ImageProbe((1, 6, 6)), ModelLabels(), 12, 2)


def setting():
    model = net()
    batches = probe_batches(model, HOW, torch.Generator().manual_seed(1))
    named = {n: p.detach() for n, p in model.named_parameters()}
    return model, named, batches, sum(p.numel() for p in named.values())


def dense(product, size):
    return torch.stack([product(row) for row in torch.eye(size, dtype=torch.float64)])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_products_are_those_of_curvlinops(matrix, keep):
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops, the oracle, is not installed (oracles.txt)"
    )
    model, named, batches, size = setting()
    product = curvature_product(model, named, loss, batches, matrix, keep_graphs=keep)
    assert model.training
    kind = {
        "hessian": curvlinops.HessianLinearOperator,
        "ggn": curvlinops.GGNLinearOperator,
    }[matrix]
    oracle = net().double().eval()
    values = list(oracle.parameters())
    exact = kind(oracle, nn.CrossEntropyLoss(), values, batches)
    vector = torch.randn(size, dtype=torch.float64)
    assert torch.allclose(product(vector), exact @ vector, atol=1e-10)
    assert torch.allclose(product(vector), exact @ vector, atol=1e-10)  # kept graphs


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_products_are_those_of_dense_derivatives(matrix):
    model, named, batches, size = setting()
    product = curvature_product(model, named, loss, batches, matrix)
    twin = net().double().eval()
    shapes = {n: p.shape for n, p in named.items()}
    flat = torch.cat([p.flatten() for p in named.values()]).double()

    def output(vector, x):
        parts = torch.split(vector, [s.numel() for s in shapes.values()])
        own = {n: v.reshape(s) for v, (n, s) in zip(parts, shapes.items(), strict=True)}
        return functional_call(twin, own, (x,))

    exact = torch.zeros(size, size, dtype=torch.float64)
    for x, y in batches:
        if matrix == "hessian":
            part = hessian(lambda v: loss(output(v, x), y).mean(), flat)  # noqa: B023
        else:
            slopes = jacobian(lambda v: output(v, x), flat)  # noqa: B023
            chances = output(flat, x).softmax(1)
            outer = chances[:, :, None] * chances[:, None, :]
            inner = torch.diag_embed(chances) - outer
            part = torch.einsum("bcn,bcd,bdm->nm", slopes, inner, slopes) / len(x)
        exact += part / len(batches)
    assert torch.allclose(dense(product, size), exact, atol=1e-10)


def test_the_largest_eigenvalues_are_those_of_the_dense_matrix(monkeypatch):
    monkeypatch.setattr("curvedp.curvature.spectrum.DENSE", 8)
    model, named, batches, size = setting()
    product = curvature_product(model, named, loss, batches, keep_graphs=True)
    exact = torch.linalg.eigvalsh(dense(product, size)).flip(0)[:20].numpy()
    found = top_eigenvalues(product, size, 20, tolerance=1e-8)
    assert found == pytest.approx(exact, rel=1e-6)
    assert top_eigenvalues(product, size, 20) == pytest.approx(exact, rel=1e-3)


def test_a_small_matrix_is_solved_whole_and_gives_all_it_has():
    values = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    assert top_eigenvalues(lambda v: values * v, 3, 10).tolist() == [3, 2, -1]
    spectrum = curvature_spectrum(lambda v: values * v, 3, Provenance.SYNTHETIC)
    assert spectrum.positive == (3.0, 2.0)
    assert spectrum.tail is None


def test_a_whitened_frame_has_the_hessian_of_its_coordinates():
    model, named, batches, size = setting()
    zeros = Batch(torch.zeros(2, 1, 6, 6), torch.zeros(2, dtype=torch.long))
    coverage = cover(model, synthesiser_like(zeros, model), loss)
    factors = estimate(
        model, coverage.covered, HOW, loss, torch.Generator().manual_seed(2)
    )
    whitener = KroneckerWhitening(side="both", rank=None).build(factors, named, 0)
    product = curvature_product(model, named, loss, batches, keep_graphs=True)
    framed = in_frame(product, whitener.apply, whitener.adjoint, named)
    map = whitener.materialize(named).double()
    exact = map @ dense(product, size) @ map.mT
    scale = float(exact.abs().max())
    assert torch.allclose(dense(framed, size), exact, atol=1e-4 * scale)
    plain = top_eigenvalues(product, size, 5)
    assert not np.allclose(top_eigenvalues(framed, size, 5), plain, rtol=0.1)


@pytest.mark.parametrize("power", [0.7, 1.0, 1.6])
def test_a_curve_of_the_right_form_is_found_again(power):
    true = Tail(5000, 1e-6, 0.9, power)
    known = true.at(np.arange(1, 101))
    fitted = fit_tail(known, 5000, 1e-6)
    assert (fitted.slope, fitted.power) == pytest.approx((0.9, power), rel=1e-4)
    total = float(true.at(np.arange(1, 5001)).sum())
    assert fitted.sum_after(100) == pytest.approx(total - known.sum(), rel=1e-6)
    by_sum = fit_tail_to_sum(known, 20_000, total, 1e-6)
    assert by_sum is not None
    assert by_sum.count == pytest.approx(5000, rel=0.06)


def test_the_curve_falls_from_the_largest_to_the_last():
    known = np.sort(np.random.default_rng(0).pareto(1.0, 50) + 0.01)[::-1]
    fitted = fit_tail(known, 800)
    values = fitted.at(np.arange(1, 801))
    assert (np.diff(values) < 0).all()
    assert values[-1] == pytest.approx(fitted.least)
    assert fit_tail_to_sum(known, 800, float(known.sum())) is None


def test_groups_keep_number_and_sum():
    known = tuple(1.0 / np.arange(1, 101) ** 0.8)
    tail = fit_tail(known, 3000)
    spectrum = CurvatureSpectrum((*known, -0.5), 9000, tail, Provenance.PUBLIC)
    values, counts = spectrum.grouped(40)
    assert len(values) <= 80
    assert counts.sum() == 3000
    assert values @ counts == pytest.approx(sum(known) + tail.sum_after(100))
    assert spectrum.facts()["provenance"] == "public"


def test_a_spectrum_without_many_large_ones_has_a_tail_of_the_right_weight():
    values = torch.arange(1, 2001, dtype=torch.float64) ** -0.9
    found = curvature_spectrum(lambda v: values * v, 2000, Provenance.SYNTHETIC, top=60)
    assert found.tail is not None
    means, counts = found.grouped()
    assert means @ counts == pytest.approx(float(values.sum()), rel=0.03)


def test_known_eigenvalues_make_the_sum_of_the_others_surer():
    values = 100 * torch.arange(1, 1001, dtype=torch.float64) ** -1.2
    known, exact = float(values[:50].sum()), float(values.sum())
    rough, sure = [], []
    for seed in range(6):
        # random directions: along the axes, signs would give the sum exactly
        noise = torch.Generator().manual_seed(seed)
        turn = torch.randn(1000, 1000, dtype=torch.float64, generator=noise)
        basis = torch.linalg.qr(turn).Q
        density = lanczos_density(
            lambda v, q=basis: q @ (values * (q.mT @ v)), 1000, steps=30, vectors=2
        )
        rough.append(density.positive_sum() / exact - 1)
        rest = density.positive_sum(below=float(values[49]))
        sure.append((known + rest) / exact - 1)
    assert max(map(abs, sure)) < 0.05
    assert np.std(sure) < 0.4 * np.std(rough)


@pytest.mark.parametrize(
    ("known", "count", "least"),
    [
        ([2.0, 1.0], 10, None),
        ([3.0, 2.0, 1.0], 3, None),
        ([1.0, 2.0, 3.0], 10, None),
        ([3.0, 2.0, -1.0], 10, None),
        ([3.0, 2.0, 1.0], 10, 1.5),
    ],
)
def test_what_no_curve_fits_is_refused(known, count, least):
    with pytest.raises(ConfigurationError):
        fit_tail(known, count, least)


@pytest.mark.parametrize("size", [10, 300])  # solved whole, and by Lanczos iterations
@pytest.mark.parametrize(
    ("factor", "said"), [(0.0, "curvature is 0"), (math.nan, "no numbers")]
)
def test_a_curvature_without_eigenvalues_is_refused(size, factor, said):
    with pytest.raises(ConfigurationError, match=said):
        curvature_spectrum(lambda v: factor * v, size, Provenance.PUBLIC, top=8)


def test_flat_curvature_and_unknown_matrices_are_refused():
    with pytest.raises(ConfigurationError, match="largest eigenvalue"):
        curvature_spectrum(lambda v: -v, 5, Provenance.SYNTHETIC)
    with pytest.raises(ConfigurationError, match="ask for 1"):
        top_eigenvalues(lambda v: v, 5, 0)
    model, named, batches, _ = setting()
    with pytest.raises(ConfigurationError, match="hessian, ggn"):
        curvature_product(model, named, loss, batches, "fisher")
