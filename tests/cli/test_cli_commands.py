"""Every command as a person or a script would call it."""

import json
import re
import shutil

import pytest

from curvedp.accounting import read_ledger
from curvedp.experiments import train_run
from tests.accounting.test_accounting_ledger import unchain

COMPARE_KEYS = {
    "recipe",
    "accuracy_mean",
    "accuracy_std",
    "seeds",
    "epsilon",
    "delta",
    "relation",
    "sigma",
    "steps",
    "seconds",
}


@pytest.fixture
def flags(blobs):
    """A small run by flags; its noise is given, so nothing has to be calibrated."""
    return [
        "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "30",
        "--epochs", "2", "--seed", "1", "--device", "cpu",
    ]  # fmt: skip


def document(result):
    """All of stdout is one JSON document."""
    return json.loads(result.stdout)


def test_help_of_every_command(call):
    text = call("--help").stdout
    for name in ("train", "compare", "evaluate", "predict", "privacy", "resume"):
        assert name in text
        assert "Usage" in call(name, "--help").stdout
    assert "curvedp" in call("--version").stdout


def test_recipes(call):
    assert "NOT PRIVATE" in call("recipes").stdout
    found = document(call("recipes", "--json"))
    assert {r["name"] for r in found["recipes"]} >= {"dp-sgd", "non-private"}
    assert document(call("recipes", "non-private", "--json"))["label"] == "NOT PRIVATE"
    assert "learning_rate" in call("recipes", "dp-sgd").stdout
    call("recipes", "no-such", code=2)


@pytest.mark.parametrize(
    ("relation", "sigma"), [("add-remove", 0.904), ("replace-one", 1.144)]
)
def test_calibrated_sigma(call, relation, sigma):
    found = document(
        call(
            "privacy",
            "calibrate",
            "--epsilon",
            1,
            "--delta",
            "1e-5",
            "--sample-rate",
            0.00426667,
            "--steps",
            1170,
            "--relation",
            relation,
            "--json",
        )
    )
    assert found["sigma"] == pytest.approx(sigma, rel=0.005)
    assert found["epsilon_achieved"] <= 1.0
    assert found["relation"] == relation


def test_calibrated_steps_and_epsilon(call):
    common = ("--sample-rate", 0.01, "--accountant", "rdp", "--json")
    steps = document(
        call("privacy", "calibrate", "--epsilon", 1, "--sigma", 1.0, *common)
    )["steps"]
    assert steps > 1
    inside, outside = (
        document(call("privacy", "epsilon", "--sigma", 1, "--steps", n, *common))
        for n in (steps, steps + 1)
    )
    assert inside["epsilon"] <= 1.0 < outside["epsilon"]
    assert "epsilon" in call("privacy", "epsilon", "--sigma", 1, "--steps", 3,
                             "--sample-rate", 0.1).stdout  # fmt: skip


def test_infinite_epsilon_is_json_too(call):
    found = document(
        call(
            "privacy",
            "epsilon",
            "--sigma",
            0,
            "--steps",
            3,
            "--sample-rate",
            0.1,
            "--json",
        )
    )
    assert found["epsilon"] == "inf"


def test_train_evaluate_predict_spent(call, flags, tmp_path):
    trained = document(call("train", *flags, "--run-dir", "run", "--json"))
    assert trained["finished"]
    assert trained["private"]
    assert trained["steps"] == 6
    assert trained["metrics_computed_on"] == "test"
    measured = document(call("evaluate", "run", "--json"))
    assert measured["metrics"] == trained["metrics"]
    more = document(call("evaluate", "run", "--metric", "f1,auc", "--json"))
    assert set(more["metrics"]) == {"f1", "auc"}
    assert "on the test split" in call("evaluate", "run").stdout
    account = document(call("privacy", "spent", "run", "--json"))
    assert account["epsilon"] == pytest.approx(trained["epsilon"])
    assert account["payments"] == 6
    assert account["gapless"]
    text = call("privacy", "spent", tmp_path / "run" / "ledger.jsonl").stdout
    assert "zero-out" in text
    assert "6 of 6" in text
    assert "finished before" in call("resume", "run").stderr
    assert document(call("resume", "run", "--json"))["finished"]


def test_predictions_go_to_stdout_or_a_file(call, flags, tmp_path, blobs):
    call("train", *flags, "--run-dir", "run")
    lines = call("predict", "run").stdout.splitlines()
    assert lines[0] == "index,prediction,probability"
    assert len(lines) == 31
    found = document(call("predict", "run", "--input", blobs, "--json"))
    assert found["count"] == len(found["predictions"]) == 30
    for name in ("out.csv", "out.jsonl", "out.json"):
        written = document(call("predict", "run", "--output", name, "--json"))
        assert written["output"] == name
        assert (tmp_path / name).stat().st_size > 0
    call("predict", "run", "--output", "out.csv", code=2)
    call("predict", "run", "--output", "out.csv", "--overwrite")
    call("predict", "run", "--output", "out.xlsx", code=2)
    call("predict", "run", "--input", "nowhere.npz", code=2)


def test_predictions_of_a_table_without_targets(call, tmp_path):
    rows = ["age,job,rich"] + [
        f"{20 + i % 50},{'ab'[i % 2]},{i % 2}" for i in range(80)
    ]
    (tmp_path / "people.csv").write_text("\n".join(rows))
    (tmp_path / "new.csv").write_text("job,age\na,30\nb,40\nunheard,50\n")
    (tmp_path / "run.toml").write_text(
        """
        model = "logreg"
        [data]
        source = "people.csv"
        test = "people.csv"
        target = "rich"
        classes = ["0", "1"]
        [data.columns]
        age = { low = 0, high = 100 }
        job = { categories = ["a", "b"] }
        [privacy]
        noise_multiplier = 2.0
        delta = 1e-3
        sample_rate = 0.25
        steps = 5
        expected_batch_size = 20
        """
    )
    trained = document(
        call("train", "--config", "run.toml", "--run-dir", "r", "--json")
    )
    assert trained["relation"] == "add-remove"
    found = document(call("predict", "r", "--input", "new.csv", "--json"))
    assert [p["prediction"] in ("0", "1") for p in found["predictions"]] == [True] * 3


def test_regression_has_a_loss_and_no_accuracy(call, tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 4)).astype(np.float32)
    np.savez(tmp_path / "r.npz", x_train=x, y_train=x[:, 0], x_test=x, y_test=x[:, 0])
    common = ("--data", "r.npz", "-D", "task=regression", "--noise-multiplier", 2,
              "--delta", "1e-3", "--batch-size", 50, "--epochs", 1)  # fmt: skip
    (row,) = document(
        call("compare", *common, "--recipes", "dp-sgd", "--seeds", 1, "--json")
    )
    assert row["metric"] == "loss"
    assert "accuracy_mean" not in row
    call("train", *common, "--metric", "accuracy", code=2)


def test_a_config_file_and_options_that_win(call, blobs, tmp_path):
    (tmp_path / "run.toml").write_text(
        f"""
        model = "logreg"
        recipe = "dp-adam"
        [data]
        source = "{blobs}"
        num_classes = 3
        [privacy]
        noise_multiplier = 2.0
        delta = 1e-3
        batch_size = 30
        epochs = 9
        [recipes.dp-sgd]
        learning_rate = 0.25
        """
    )
    plan = document(
        call("train", "--config", "run.toml", "--recipe", "dp-sgd", "--sample-rate",
             0.3, "--steps", 4, "--expected-batch-size", 27, "--dry-run", "--json")
    )  # fmt: skip
    assert (plan["recipe"], plan["steps"], plan["relation"]) == (
        "dp-sgd",
        4,
        "add-remove",
    )


def test_dry_run_trains_and_writes_nothing(call, flags, tmp_path):
    before = sorted(tmp_path.iterdir())
    text = call("train", *flags, "--dry-run").stdout
    for word in ("Linear", "sigma", "sample rate", "about", "zero-out", "Not covered"):
        assert word in text
    plan = document(call("train", *flags, "--dry-run", "--json"))
    assert plan["steps"] == 6
    assert plan["expected_seconds"] >= 0
    assert len(plan["coverage"]) == 1
    plans = document(call("compare", *flags, "--dry-run", "--json"))
    assert [p["recipe"] for p in plans] == ["dp-sgd", "non-private"]
    assert plans[1]["label"] == "NOT PRIVATE"
    assert "NOT PRIVATE" in call("compare", *flags, "--dry-run").stdout
    assert sorted(tmp_path.iterdir()) == before


def test_compare(call, flags, tmp_path):
    rows = document(
        call("compare", *flags, "--recipes", "dp-sgd,dp-adam,non-private", "--seeds", 2,
             "--set", "dp-sgd.learning_rate=0.25", "--run-dir", "c", "--json")
    )  # fmt: skip
    assert [row["recipe"] for row in rows] == ["dp-sgd", "dp-adam", "non-private"]
    assert all(row.keys() >= COMPARE_KEYS for row in rows)
    sgd, _, reference = rows
    assert sgd["seeds"] == 2
    assert sgd["epsilon_of_all_runs"] > sgd["epsilon"]
    assert reference["epsilon"] is None
    assert reference["label"] == "NOT PRIVATE"
    assert json.loads((tmp_path / "c" / "compare.json").read_text()) == rows
    assert (tmp_path / "c" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert read_ledger(tmp_path / "c" / "dp-sgd-seed-1" / "ledger.jsonl").count() == 6
    again = call("resume", "c")  # shows the finished comparison
    assert "NOT PRIVATE" in again.stdout
    assert "±" in again.stdout


def test_default_run_dir(call, flags, tmp_path):
    call("train", *flags)
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"blobs-dp-sgd-\d{8}-\d{6}", run.name)


def test_unsafe_noise_is_loud(call, flags):
    shown = call("train", *flags, "--unsafe-reproducible-noise", 3, "--run-dir", "r")
    assert "NO PRIVACY GUARANTEE" in shown.stdout
    text = call("privacy", "spent", "r").stdout
    assert "NO PRIVACY GUARANTEE" in text
    assert "unsafe_reproducible_noise" in text
    assert document(call("privacy", "spent", "r", "--json"))["private"] is False


def test_private_quantities_are_not_printed(call, flags):
    quiet = call("train", *flags, "--run-dir", "r")
    assert "PRIVATE loss" not in quiet.output
    loud = call("train", *flags, "--run-dir", "s", "--show-private-training-loss")
    assert "PRIVATE loss" in loud.stderr
    assert "loss was shown" in call("privacy", "spent", "s").stdout


def test_spent_says_when_a_ledger_has_no_chain(call, flags, tmp_path):
    call("train", *flags, "--run-dir", "r")
    assert document(call("privacy", "spent", "r", "--json"))["chained"] is True
    assert "version 1" not in call("privacy", "spent", "r").stdout
    shutil.copy(tmp_path / "r" / "ledger.jsonl", tmp_path / "old.jsonl")
    unchain(tmp_path / "old.jsonl")
    assert document(call("privacy", "spent", "old.jsonl", "--json"))["chained"] is False
    text = " ".join(call("privacy", "spent", "old.jsonl").stdout.split())
    assert "a ledger of version 1, whose lines carry no checksums" in text


def test_spent_refuses_a_ledger_that_its_run_has_seen_longer(call, flags, tmp_path):
    call("train", *flags, "--run-dir", "r")
    ledger = tmp_path / "r" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    for given in ("r", ledger):
        assert "cut short" in call("privacy", "spent", given, code=2).stderr
    shutil.copy(ledger, tmp_path / "copy.jsonl")  # alone it cannot be told
    assert document(call("privacy", "spent", "copy.jsonl", "--json"))["payments"] == 5


def test_output_fits_eighty_columns(call, flags):
    shown = call("train", *flags, "--run-dir", "r")
    table = call("compare", *flags, "--seeds", 2, "--run-dir", "c")
    for text in (shown.stdout, table.stdout, call("recipes").stdout):
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_resume_starts_a_run_that_never_began(call, config, tmp_path):
    from curvedp.experiments import RunFolder

    RunFolder.create(tmp_path / "run", config)
    assert document(call("resume", "run", "--json"))["steps"] == 12
    train_run(config, tmp_path / "other")
    assert (
        document(call("evaluate", "run", "--json"))["metrics"]
        == document(call("evaluate", "other", "--json"))["metrics"]
    )


def test_explain_plan_shows_every_layer_and_trains_nothing(call, flags, tmp_path):
    options = ["train", *flags, "--recipe", "dp-kfc", "--explain-plan"]
    shown = call(*options).stdout
    assert "map / pass" in shown and "full, before" in shown
    found = document(call(*options, "--json"))
    assert found["layers"] and found["physical_batch_size"] >= 30
    assert not (tmp_path / "runs").exists()
    for layer in found["layers"]:
        assert layer["layer"] in shown and layer["norms"] in shown
    call("train", *flags, "--recipe", "non-private", "--explain-plan", code=2)


def test_the_physical_batch_size_can_be_found_out(call, flags):
    options = ["train", *flags, "--dry-run", "--json", "--physical-batch-size"]
    assert document(call(*options, "auto"))["physical_batch_size"] >= 30
    assert document(call(*options, "7"))["physical_batch_size"] == 7
    call(*options, "lots", code=2)
