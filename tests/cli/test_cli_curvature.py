"""Recipes that whiten on the command line: settings, public data, the oracle."""

import json

import numpy as np
import pytest

from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.experiments import RunFolder, resume_run, train_run
from curvedp.recipes import RECIPES

SMALL = ["--set", "probe_size=16", "--set", "probe_batches=1"]


@pytest.fixture
def train(call, blobs):
    """Trains a small run in the folder "run"."""

    def run(*arguments, recipe="dp-kfc", code=0):
        return call(
            "train", "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
            "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "30",
            "--epochs", "2", "--seed", "1", "--device", "cpu", "--recipe", recipe,
            "--run-dir", "run", *SMALL, *arguments, code=code,
        )  # fmt: skip

    return run


def public(tmp_path, rows=40, columns=6, classes=3, name="public.npz"):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    np.savez(tmp_path / name, x=x, y=rng.integers(0, classes, rows))
    return tmp_path / name


def stored(tmp_path, file="run.json"):
    return json.loads((tmp_path / "run" / file).read_text())


def test_every_setting_can_be_set(train, tmp_path):
    train("--set", "damping=0.2", "--set", "side=both", "--set", "leave_out=1",
          "--mode", "paper", "--set", "learning_rate=0.3")  # fmt: skip
    config = RunFolder.open(tmp_path / "run").config
    facts = config.configured_recipe().facts()
    assert facts["damping"] == 0.2
    assert facts["leave_out"] == "1"  # a layer's name, though it looks like a number
    assert facts["learning_rate"] == 0.3
    assert facts["absolute_damping"] is True  # of the mode
    assert stored(tmp_path, "result.json")["private"]
    assert "label" not in stored(tmp_path)


def test_the_config_file_has_them_too(call, blobs, tmp_path):
    (tmp_path / "run.toml").write_text(
        f'data = {{source = "{blobs}", num_classes = 3}}\nmodel = "logreg"\n'
        '[recipe]\nname = "dp-kfc"\nmode = "paper"\nprobe_size = 16\nrefresh = 4\n'
        "[privacy]\nnoise_multiplier = 2.0\ndelta = 1e-3\nbatch_size = 30\nepochs = 2\n"
    )
    call("train", "--config", "run.toml", "--run-dir", "run", "--set", "refresh=3")
    settings = stored(tmp_path)["config"]["recipe_settings"]
    assert settings == {"mode": "paper", "probe_size": 16, "refresh": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "refresh=abc"], ["refresh", "'abc'", "whole number"]),
        (["--set", "refresh=2.5"], ["refresh", "2.5", "whole number"]),
        (["--set", "refresh=-1"], ["refresh", "-1"]),
        (["--set", "damping=-1"], ["damping", "-1", "positive"]),
        (["--set", "damping=nan"], ["damping", "finite"]),
        (["--set", "product=1"], ["product", "true or false"]),
        (["--set", "side=left"], ["side", "'left'"]),
        (["--set", "dampng=1"], ["dampng", "damping"]),
        (["--set", "refresh"], ["--set", "KEY=VALUE"]),
        (["--set", "momentum=0.5", "--momentum", "0.5"], ["momentum", "once"]),
        (["--mode", "papr"], ["'papr'", "official"]),
        (["--set", "probe=public"], ["public", "--public-data"]),
    ],
)
def test_settings_are_refused_by_name(train, tmp_path, arguments, words):
    text = train(*arguments, code=2).stderr
    assert all(word in text for word in words), text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "settings", "word"),
    [
        ("dp-ngd", {"leave_out": "head"}, "leave_out"),
        ("dp-ngd", {"damping": 0.3}, "damping"),
        ("dp-ngd", {"floor_base": 2.0}, "floor_base"),
        ("dp-ngd", {"plain_step": 0}, "plain_step"),
        ("dp-kfc", {"clamp": "matched"}, "side"),
        ("dp-ngd", {"diagonal": True}, "diagonal"),
        ("dp-kfc", {"diagonal": 1}, "diagonal"),
        ("dp-kfc", {"diagonal": True, "side": "both"}, "side"),
        ("dp-kfc", {"diagonal": True, "rank": 0}, "rank"),
        ("dp-kfc", {"diagonal": True, "product": True}, "product"),
        ("dp-kfc", {"diagonal": True, "match_scale": True}, "match_scale"),
        ("dp-kfc", {"probe_size": True}, "probe_size"),
        ("dp-kfc", {"learning_rate": "fast"}, "learning_rate"),
        ("dp-sgd", {"clip_norm": "a"}, "clip_norm"),
        ("dp-sgd", {"momentum": float("inf")}, "momentum"),
    ],
)
def test_recipes_refuse_what_has_no_effect_or_the_wrong_type(recipe, settings, word):
    with pytest.raises(ConfigurationError, match=word):
        RECIPES[recipe].configure(**settings)


def test_public_data_is_probed_stored_and_found_again(train, call, tmp_path):
    public(tmp_path)
    text = train("--public-data", "public.npz", "-P", "num_classes=3").stdout
    assert "declared public" in text  # among what the guarantee does not cover
    config = stored(tmp_path)["config"]
    assert config["public_data"] == str(tmp_path / "public.npz")
    assert config["public_data_options"] == {"num_classes": 3}
    (tmp_path / "public.npz").unlink()
    call("evaluate", "run")  # needs no probes


def test_a_stopped_run_goes_on_with_its_public_data(config, tmp_path):
    from dataclasses import replace

    config = replace(
        config,
        recipe="dp-kfc",
        recipe_settings={"probe_size": 16, "refresh": 4},
        public_data=str(public(tmp_path)),
        public_data_options={"num_classes": 3},
    )
    whole = train_run(config, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step == 7:
            raise Stop

    with pytest.raises(Stop):
        train_run(config, tmp_path / "run", on_progress=stop)
    assert resume_run(tmp_path / "run").metrics == whole.metrics


@pytest.mark.parametrize(
    ("arguments", "recipe", "words"),
    [
        (["--public-data", "nowhere.npz"], "dp-kfc", ["nowhere.npz"]),
        (["--public-data", "wide.npz", "-P", "num_classes=3"], "dp-kfc", ["[7]"]),
        (["--public-data", "few.npz", "-P", "num_classes=3"], "dp-kfc", ["8", "16"]),
        (["--public-data", "blobs.npz"], "dp-kfc", ["private data itself"]),
        (["--public-data", "public.npz", "-P", "num_classes=3",
          "--set", "probe=synthetic"], "dp-kfc", ["'synthetic'"]),
        (["--public-data", "classes.npz", "-P", "num_classes=5",
          "--set", "labels=own"], "dp-kfc", ["own labels"]),
    ],
)  # fmt: skip
def test_public_data_that_does_not_fit_is_refused(
    train, tmp_path, arguments, recipe, words
):
    public(tmp_path)
    public(tmp_path, columns=7, name="wide.npz")
    public(tmp_path, rows=8, name="few.npz")
    public(tmp_path, classes=5, name="classes.npz")
    text = train(*arguments, recipe=recipe, code=2).stderr
    assert all(word in text for word in words), text
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_does_not_whiten_takes_no_public_data(call, blobs, tmp_path):
    public(tmp_path)
    flags = ["--data", blobs, "-D", "num_classes=3", "--noise-multiplier", "2",
             "--public-data", "public.npz", "-P", "num_classes=3", "--delta", "1e-3",
             "--batch-size", "30", "--epochs", "1", "--device", "cpu"]  # fmt: skip
    text = call("train", "--recipe", "dp-sgd", *flags, code=2).stderr
    assert "takes none" in text
    call("compare", "--recipes", "dp-sgd,dp-kfc", "--seeds", "1", "--run-dir", "both",
         "--set", "dp-kfc.probe_size=16", *flags)  # fmt: skip
    runs = {p.parent.name: json.loads(p.read_text())["config"]
            for p in (tmp_path / "both").glob("*/run.json")}  # fmt: skip
    taken = {name.partition("-seed")[0]: run["public_data"] != ""
             for name, run in runs.items()}  # fmt: skip
    assert taken == {"dp-sgd": False, "dp-kfc": True}


def test_the_dry_run_shows_probe_whitening_and_refresh(train, tmp_path):
    text = train("--dry-run", "--set", "refresh=4").stdout
    assert "synthetic" in text
    assert "32 eigenpairs" in text
    diagonal = train("--dry-run", "--set", "diagonal=true").stdout
    assert "diagonal, exponent 0.5" in diagonal
    assert "eigenpairs" not in diagonal
    assert "every 4 steps" in text
    assert json.loads(train("--dry-run", "--json").stdout)["curvature"]["side"] == "a"
    assert "floor matched" in train("--dry-run", recipe="dp-ngd").stdout
    assert "curvature" in json.loads(train("--dry-run", "--json").stdout)
    assert not (tmp_path / "run").exists()


def test_an_oracle_is_labelled_everywhere_and_prints_no_epsilon(train, call, tmp_path):
    oracle = ("--set", "probe=oracle")
    plan = train(*oracle, "--dry-run").stdout
    assert "NOT PRIVATE" in plan
    assert "epsilon  " not in plan
    assert json.loads(train(*oracle, "--dry-run", "--json").stdout)["epsilon"] is None
    text = train(*oracle).stdout
    assert "NOT PRIVATE" in text
    assert "epsilon 0" not in text
    assert "-differential privacy" not in text
    assert stored(tmp_path)["label"] == "NOT PRIVATE"
    result = stored(tmp_path, "result.json")
    assert result["label"] == "NOT PRIVATE"
    assert result["epsilon"] is None
    assert result["statement"]["epsilon_spent"] is None
    for command in ("evaluate", "resume"):
        assert "NOT PRIVATE" in call(command, "run").stdout
        assert json.loads(call(command, "run", "--json").stdout)["label"]
    assert "NOT PRIVATE" in call("privacy", "spent", "run", code=2).stderr
    found = json.loads(call("predict", "run", "--json").stdout)
    assert found["label"] == "NOT PRIVATE"


def test_an_oracle_is_labelled_in_comparisons(call, blobs, tmp_path):
    flags = ["--data", blobs, "-D", "num_classes=3", "--noise-multiplier", "2",
             "--delta", "1e-3", "--batch-size", "30", "--epochs", "1", "--device",
             "cpu", "--seeds", "1", "--set", "dp-kfc.probe=oracle",
             "--set", "dp-kfc.probe_size=16", "--run-dir", "both"]  # fmt: skip
    text = call("compare", "--recipes", "dp-sgd,dp-kfc", *flags).stdout
    assert "took curvature from the private data" in text
    rows = {r["recipe"]: r for r in json.loads(
        (tmp_path / "both" / "compare.json").read_text())}  # fmt: skip
    assert rows["dp-kfc"]["label"] == "NOT PRIVATE"
    assert rows["dp-kfc"]["epsilon"] is rows["dp-kfc"]["epsilon_of_all_runs"] is None
    alone = rows["dp-sgd"]["epsilon"]
    assert rows["dp-sgd"]["epsilon_of_all_runs"] == pytest.approx(alone, rel=1e-3)


def test_a_ledger_with_an_oracle_in_it_has_no_epsilon_whoever_reads_it(train, tmp_path):
    from curvedp.accounting import read_ledger

    train("--set", "probe=oracle")
    with pytest.raises(NotPrivateError):
        read_ledger(tmp_path / "run" / "ledger.jsonl").epsilon()


def test_recipes_show_their_whitening(call):
    text = call("recipes").stdout
    assert "dp-kfc" in text
    assert "dp-ngd" in text
    assert "official" in call("recipes", "dp-kfc").stdout


def test_measured_curvature_trains_with_a_guarantee(call, blobs, tmp_path):
    run = [
        "train", "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "30",
        "--epochs", "2", "--seed", "1", "--device", "cpu", "--recipe", "dp-kfc",
        "--set", "probe=private", "--set", "refresh=2",
    ]  # fmt: skip
    plan = " ".join(call(*run, "--dry-run").stdout.split())
    assert "measured with noise for 0.2 of the squared clip bound" in plan
    text = " ".join(call(*run, "--run-dir", "run").stdout.split())
    assert "measured on the private data" in text
    assert stored(tmp_path, "result.json")["private"]
    assert "label" not in stored(tmp_path)
    call("evaluate", "run")
