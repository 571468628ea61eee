"""Runs whose noise is designed for a spectrum that is found before the first step."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.curvature import curvature_product, probe_batches
from curvedp.errors import CheckpointError, ConfigurationError
from curvedp.noise import Stream
from curvedp.noise.strategies import NoiseCurve
from curvedp.probes import (
    FeatureProbe,
    NormalColumn,
    OracleProbe,
    PublicProbe,
    labels_for,
)
from curvedp.recipes import RECIPES, Eigenvalues

NAMES = ("noisecurve", "dp-kfc+noisecurve")


def data(n=60, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def attach(recipe="noisecurve", dataset=None, own=None, lr=0.5, **settings):
    own = net() if own is None else own
    return make_private(
        own,
        torch.optim.SGD(own.parameters(), lr=lr),
        data() if dataset is None else dataset,
        recipe=recipe,
        loss="cross-entropy",
        **{
            "noise_multiplier": 1.0, "sample_rate": 0.2, "steps": 12, "bands": 3,
            "expected_batch_size": 10, "physical_batch_size": 16, "seed": 3,
            "spectrum_size": 32, "spectrum_top": 12, **settings,
        },
    )  # fmt: skip


def noise_of(private):
    return private.plan.facts()["noise"]


def train(private, steps):
    for x, y in private.loader:
        private.train_on((x, y))
        if private.step >= steps:
            break


@pytest.mark.parametrize("recipe", NAMES)
def test_the_design_is_for_the_spectrum_and_not_for_prefix_sums(recipe):
    noise = noise_of(attach(recipe))
    assert noise["workload"]["kind"] == "noisecurve"
    assert noise["spectrum"]["provenance"] == "synthetic"
    frame = "parameters" if recipe == "noisecurve" else "whitened"
    assert noise["spectrum"]["frame"] == frame


@pytest.mark.parametrize("recipe", NAMES)
def test_nothing_of_it_depends_on_the_private_data(recipe):
    one = noise_of(attach(recipe))
    other = noise_of(attach(recipe, data(seed=8, scale=30.0)))
    assert one == other


def test_the_largest_eigenvalue_is_that_of_the_probe():
    private = attach()
    own, found = net(), noise_of(private)["spectrum"]
    probe = FeatureProbe(tuple(NormalColumn() for _ in range(4)))
    how = Eigenvalues(spectrum_size=32).estimate(probe, labels_for("cross-entropy"))
    seed = private._engine.streams.torch_seed(Stream.SPECTRUM) % 2**63
    batches = probe_batches(own, how, torch.Generator().manual_seed(seed))
    named = {n: p.detach() for n, p in own.named_parameters()}
    product = curvature_product(own, named, _loss, batches)
    size = sum(p.numel() for p in named.values())
    matrix = torch.stack([product(v) for v in torch.eye(size, dtype=torch.float64)])
    exact = float(torch.linalg.eigvalsh(matrix)[-1])
    assert found["largest"] == pytest.approx(exact, rel=1e-3)
    assert 0 < found["clip_weight"] <= 1


def _loss(output, targets):
    return nn.functional.cross_entropy(output, targets, reduction="none")


def test_a_large_learning_rate_overshoots_and_is_capped():
    noise = noise_of(attach(lr=1e4))
    rate = noise["workload"]["learning_rate"]
    assert noise["spectrum"]["overshooting"] > 0
    assert max(noise["workload"]["eigenvalues"]) <= 1 / rate


def test_public_data_is_declared_and_private_data_refused():
    public = PublicProbe(data(40, seed=5))
    private = attach(mode="public", probes=public)
    assert noise_of(private)["spectrum"]["provenance"] == "public"
    text = str(private.statement())
    assert "public, to probe curvature" in text
    assert "eigenvalues" in text
    with pytest.raises(ConfigurationError, match="no public data"):
        attach(mode="public")
    with pytest.raises(ConfigurationError, match="private data"):
        attach(probes=OracleProbe(data()))


@pytest.mark.parametrize("recipe", NAMES)
def test_a_resumed_run_keeps_its_strategy_whatever_the_model_is(recipe, tmp_path):
    folder = tmp_path / "run"
    with attach(recipe, run_dir=folder) as private:
        train(private, 4)
        private.save()
        before = noise_of(private)
    header = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
    assert json.dumps(before["spectrum"], sort_keys=True) in json.dumps(
        header, sort_keys=True
    )
    assert noise_of(attach(recipe, own=net(seed=9))) != before
    with attach(recipe, own=net(seed=9), run_dir=folder) as again:
        assert noise_of(again) == before
        again.resume()
        assert again.step == 4
        train(again, 6)
        assert again.step == 6


def test_other_eigenvalue_settings_are_another_run(tmp_path):
    with attach(run_dir=tmp_path / "run") as private:
        train(private, 2)
        private.save()
    with (
        attach(run_dir=tmp_path / "run", spectrum_top=7) as other,
        pytest.raises(CheckpointError, match="eigenvalues"),
    ):
        other.resume()


def test_bands_are_chosen_for_the_spectrum():
    private = attach(
        noise_multiplier=None, epsilon=8.0, delta=1e-3, bands="auto", steps=24,
        sample_rate=0.05, expected_batch_size=3, accountant="rdp", most_bands=4,
    )  # fmt: skip
    assert private.plan.correlation.bands >= 1
    assert private.plan.epsilon() <= 8.0 + 1e-6
    assert isinstance(private.plan.correlation.design.named_workload(), NoiseCurve)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("noisecurve", {"noise_momentum": 0.9}),
        ("noisecurve", {"spectrum_probe": "private"}),
        ("noisecurve", {"spectrum_matrix": "fisher"}),
        ("noisecurve", {"spectrum_top": 0}),
        ("dp-kfc+noisecurve", {"back_map": "none"}),
        ("dp-kfc+noisecurve", {"clip_order": "before"}),
    ],
)
def test_what_has_no_such_design_is_refused(recipe, settings):
    with pytest.raises(ConfigurationError):
        RECIPES[recipe].configure(**settings)


@pytest.mark.parametrize("recipe", NAMES)
def test_one_band_needs_no_spectrum(recipe, monkeypatch):
    def refuse(*_):
        raise AssertionError("searched for a spectrum")

    monkeypatch.setattr("curvedp.train.attach.find_design", refuse)
    private = attach(recipe, bands=1)
    assert "spectrum" not in noise_of(private)
    with pytest.raises(AssertionError, match="searched"):
        attach(recipe, bands=2)


@pytest.mark.parametrize("bands", [1, 2])
@pytest.mark.parametrize("recipe", NAMES)
def test_the_noise_is_what_was_asked_for(recipe, bands):
    for asked in (0.5, 4.0):
        plan = attach(recipe, bands=bands, noise_multiplier=asked).plan
        assert plan.noise_multiplier == asked
        private = attach(
            recipe, bands=bands, noise_multiplier=None, epsilon=asked, delta=1e-3
        )
        assert private.plan.target_epsilon == asked
        assert 0.9 * asked <= private.plan.epsilon() <= asked
