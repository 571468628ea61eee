"""Rivals on the command line: modes, public data, dry runs, comparisons."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from curvedp.cli.app import app
from curvedp.recipes import RECIPES

RIVALS = ["adadps", "gep", "dp-soap", "dp-sgd-pt"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(80, 6)).astype(np.float32)
    np.savez(tmp_path / "public.npz", x=x, y=rng.integers(0, 3, 80))

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def run_options(blobs):
    return [
        "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "30",
        "--epochs", "2", "--seed", "1", "--device", "cpu",
    ]  # fmt: skip


PUBLIC = ["--public-data", "public.npz", "-P", "num_classes=3"]


def small(recipe):
    if not RECIPES[recipe].probes:
        return []
    return ["--set", "probe_size=16", "--set", "probe_batches=1"]


@pytest.mark.parametrize("recipe", RIVALS)
@pytest.mark.parametrize("dry", [True, False])
def test_rivals_train_and_say_what_they_would_do(call, blobs, recipe, dry):
    extra = PUBLIC if RECIPES[recipe].pretrains else []
    extra = [*extra, *(["--dry-run"] if dry else ["--run-dir", "run"])]
    text = call(
        "train", *run_options(blobs), "--recipe", recipe, *small(recipe), *extra
    ).stdout
    assert "differential privacy" in text
    said = {
        "adadps": "batch-squares",
        "gep": "subspace of 50",
        "dp-soap": "average of releases",
        "dp-sgd-pt": "to pretrain on",
    }
    if dry or recipe == "dp-sgd-pt":
        assert said[recipe] in text


@pytest.mark.parametrize("recipe", ["adadps", "gep"])
def test_public_data_with_its_own_labels(call, blobs, recipe):
    text = call(
        "train", *run_options(blobs), "--recipe", recipe, "--mode", "public", *PUBLIC,
        *small(recipe), "--run-dir", "run",
    ).stdout  # fmt: skip
    assert "declared public" in text


def test_correlated_noise_after_pretraining_without_labels(call, blobs):
    text = call(
        "train", *run_options(blobs), "--recipe", "noisecurve", *PUBLIC,
        "--set", "pretrain_epochs=2", "--set", "pretrain_labels=random", "--set",
        "bands=2", "--set", "spectrum_size=16", "--run-dir", "run",
    ).stdout  # fmt: skip
    assert "to pretrain on" in text
    assert "eigenvalues" in text
    assert Path("run/pretrained.safetensors").exists()


def test_the_biased_form(call, blobs):
    call(
        "train", *run_options(blobs), "--recipe", "gep", "--mode", "biased",
        *small("gep"), "--run-dir", "run",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "extra", "words"),
    [
        ("dp-sgd-pt", [], ["pretrains", "--public-data"]),
        ("dp-soap", PUBLIC, ["releases"]),
        ("dp-sgd-pt", [*PUBLIC, "--set", "pretrain_batch_size=100"], ["80", "100"]),
        ("gep", ["--clipping", "adaptive"], ["one threshold"]),
        ("dp-bandmf", PUBLIC, ["pretrain_epochs"]),
        ("noisecurve", ["--set", "pretrain_epochs=2"], ["pretrains", "--public-data"]),
        (
            "dp-sgd-pt",
            [*PUBLIC, "--set", "pretrain_labels=simclr"],
            ["images", "pretrain_labels"],
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(call, blobs, recipe, extra, words):
    result = call("train", *run_options(blobs), "--recipe", recipe, *extra, code=2)
    for word in words:
        assert word in result.output


def test_a_comparison_gives_public_data_to_those_that_use_it(call, blobs):
    result = call(
        "compare", *run_options(blobs), *PUBLIC, "--recipes",
        "dp-sgd,dp-soap,dp-sgd-pt", "--seeds", "1", "--run-dir", "all", "--json",
    )  # fmt: skip
    rows = json.loads(result.stdout)
    assert [row["recipe"] for row in rows] == ["dp-sgd", "dp-soap", "dp-sgd-pt"]


@pytest.mark.parametrize("recipe", RIVALS)
def test_the_list_of_recipes_names_them(call, recipe):
    facts = json.loads(call("recipes", recipe, "--json").stdout)
    assert facts["name"] == recipe
    assert facts["private"]
