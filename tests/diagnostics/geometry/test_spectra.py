"""Eigenvalues of factors, thinned ranks, mean-field recursion, ratios."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.curvature import DenseFactor
from curvedp.diagnostics.geometry import (
    Study,
    eigenvalue_ratio,
    input_scales,
    layer_spectra,
    sources_of,
    variance_recursion,
)
from curvedp.diagnostics.geometry.spectra import thinned
from curvedp.errors import ConfigurationError
from curvedp.recipes import Curvature
from tests.diagnostics.geometry.nets import sources, study


def test_spectra_are_those_of_the_written_out_matrices():
    of = study()
    factors = of.factors(sources(of)["synthetic"])
    spectra = {(s.layer, s.factor): s for s in layer_spectra(factors)}
    for name, factor in factors.layers.items():
        if not isinstance(factor, DenseFactor):
            assert len(spectra[name, "diagonal"].values) == 8
            continue
        a, g = factor.a.mean()[0].double(), factor.g.mean()[0].double()
        for key, matrix in (("A", a), ("G", g), ("F", torch.kron(a, g))):
            found = spectra[name, key]
            exact = torch.linalg.eigvalsh(matrix).flip(0)
            assert found.size == len(exact)
            assert found.trace == pytest.approx(float(matrix.trace()), rel=1e-6)
            kept = exact[found.ranks - 1].clamp_min(0)
            assert torch.allclose(found.values, kept, atol=1e-6 * float(exact[0]))


def test_ranks_are_thinned_on_a_logarithmic_axis():
    assert thinned(5, None).tolist() == thinned(5, 9).tolist() == [1, 2, 3, 4, 5]
    ranks = thinned(100_000, 200)
    assert ranks[0] == 1 and ranks[-1] == 100_000
    assert 100 < len(ranks) <= 200
    assert ranks.unique().tolist() == ranks.tolist()


def test_bounded_activations_forget_their_start_and_relu_does_not():
    def gap(activation, weight_variance):
        ends = [
            variance_recursion(
                q, 30, activation, weight_variance=weight_variance, bias_variance=0.1
            )
            for q in (0.1, 10.0)
        ]
        return [abs(b - a) for a, b in zip(*ends, strict=True)]

    tanh = gap(torch.tanh, 0.8)
    assert tanh[30] < 1e-6 * tanh[0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(tanh))
    assert gap(torch.relu, 2.0)[30] == pytest.approx(9.9)


def test_the_recursion_of_relu_in_closed_form():
    found = variance_recursion(
        3.0, 2, torch.relu, weight_variance=1.0, bias_variance=0.5
    )
    assert found == pytest.approx([3.0, 2.0, 1.5], rel=1e-4)
    with pytest.raises(ConfigurationError):
        variance_recursion(-1.0, 2, torch.relu, weight_variance=1.0)


def wide_tanh(depth=5, width=200, weight_variance=0.9, bias_variance=0.05):
    torch.manual_seed(0)
    layers = []
    for i in range(depth):
        linear = nn.Linear(width, width if i < depth - 1 else 4)
        nn.init.normal_(linear.weight, std=math.sqrt(weight_variance / width))
        nn.init.normal_(linear.bias, std=math.sqrt(bias_variance))
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def test_a_wide_network_follows_the_recursion_and_forgets_the_scale_of_its_inputs():
    model = wide_tanh()
    loud = TensorDataset(
        3 * torch.randn(64, 200, generator=torch.Generator().manual_seed(1)),
        torch.zeros(64).long(),
    )
    of = Study.of(model, "cross-entropy", loud)
    found = sources_of(of, loud, curvature=Curvature(probe_size=64, probe_batches=1))
    assert "white" not in found  # columns have no spectrum
    scales = {n: list(input_scales(of.factors(s)).values()) for n, s in found.items()}
    for name, start in (("oracle", 9.0), ("synthetic", 1.0)):
        recursion = variance_recursion(
            0.9 * start + 0.05, 4, torch.tanh, weight_variance=0.9, bias_variance=0.05
        )
        measured = [0.9 * s + 0.05 for s in scales[name]]
        assert measured == pytest.approx(recursion, rel=0.12)
    ratio = [a / b for a, b in zip(scales["oracle"], scales["synthetic"], strict=True)]
    assert ratio[0] > 8 and ratio[-1] < 1.6
    assert ratio == sorted(ratio, reverse=True)


def test_ratios_of_eigenvalues():
    values = torch.tensor([8.0, 4.0, 2.0, 1e-9])
    same = eigenvalue_ratio(3 * values, values)
    assert (same.alpha, same.spread, same.compared) == pytest.approx((3, 1, 3))
    other = eigenvalue_ratio(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 1.0]))
    assert (other.alpha, other.spread) == pytest.approx((2, 2))
    assert other.ratios == [4, 1]
    assert eigenvalue_ratio(torch.zeros(2), torch.ones(2)).compared == 0
    with pytest.raises(ConfigurationError, match="one length"):
        eigenvalue_ratio(torch.ones(2), torch.ones(3))


def test_labels_of_their_own_are_for_data_and_settings_of_a_reproduction_for_noise():
    of = study()
    own = sources(of, Curvature(labels="own"))
    kinds = {n: s.how.labels.describe()["kind"] for n, s in own.items()}
    assert kinds == {"oracle": "own", "synthetic": "model", "white": "model"}
    official = sources(of, Curvature(mean_loss=True))["synthetic"].how
    assert official.mean_loss and official.probe.std == 0.5


def test_sources_are_chosen_by_name():
    of = study()
    assert list(sources(of, names=("white", "oracle"))) == ["oracle", "white"]
    with pytest.raises(ConfigurationError, match="'public'"):
        sources(of, names=("public",))
    with pytest.raises(ConfigurationError, match="'pink'"):
        sources(of, names=("pink",))
