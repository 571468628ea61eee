"""``curvedp sweep`` as a person or a script would call it."""

import json

import dp_accounting as dp
import pytest
from dp_accounting import dp_event, rdp

from curvedp.accounting import read_ledger


@pytest.fixture
def flags(blobs):
    return [
        "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "30",
        "--epochs", "2", "--seed", "1", "--device", "cpu", "--validation", "0.3",
        "--validation-is-public", "--run-dir", "out", "--trials", "3",
    ]  # fmt: skip


def test_digits_with_counted_tuning_end_at_dp_accountings_total(call, tmp_path):
    trials = 4
    found = call(
        "sweep", "--data", "digits", "--epsilon", "3", "--validation", "0.2",
        "--epochs", "3", "--count-tuning", "--trials", trials, "--device", "cpu",
        "--repeats", "geometric",
        "--search", "learning_rate=log:0.1:2", "--set", "clipping=normalised",
        "--set", "clip_norm=1.0", "--run-dir", "out", "--json",
    )  # fmt: skip
    document = json.loads(found.stdout)
    facts = document["statement"]
    rate = facts["sample_rate"]
    accountant = rdp.RdpAccountant(
        neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL
    )
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(document["sigma"]))
    trial = dp.SelfComposedDpEvent(step, facts["planned_steps"])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, trials, 1))
    total = accountant.get_epsilon(1e-5)
    scores = read_ledger(tmp_path / "out" / "score-ledger.jsonl").epsilon()
    assert document["relation"] == "zero-out"
    assert document["epsilon"] == max(total, scores) <= 3.0
    assert total == pytest.approx(document["epsilon"], rel=1e-3)
    assert read_ledger(tmp_path / "out" / "ledger.jsonl").epsilon() == total
    assert facts["epsilon"] == document["epsilon"]
    spent = call("privacy", "spent", "out", "--json").stdout
    assert json.loads(spent)["epsilon"] == total
    assert "trial 0" not in found.stderr and "trial-0" not in found.output


def test_for_people(call, flags):
    found = call("sweep", *flags)
    assert "accuracy, validation" in found.stdout
    assert "tuning is not counted in epsilon" in " ".join(found.stdout.split())
    assert "curvedp train --data" in found.stdout
    assert "training trial 0 (of 3)" in found.stderr
    assert "training" not in found.stdout.replace("training data", "")


def test_for_people_counted(call, flags):
    found = call("sweep", *flags, "--count-tuning", "--repeats", "geometric")
    text = " ".join(found.stdout.split())
    assert "tuning is counted" in text and "must stay secret" in text
    assert "geometric, 3 expected" in text
    assert "how many trials there are is not shown" in found.stderr


def test_resume_and_help(call, flags):
    first = json.loads(call("sweep", *flags, "--json").stdout)
    assert json.loads(call("resume", "out", "--json").stdout) == first
    again = call("sweep", *flags, "--json")
    assert json.loads(again.stdout) == first and "helping with" in again.stderr
    unseeded = [f for f in flags if f not in ("--seed",)]
    unseeded.remove("1")
    assert json.loads(call("sweep", *unseeded, "--json").stdout) == first


def test_options_of_a_file(call, flags, tmp_path):
    (tmp_path / "a.toml").write_text('[recipe]\nname = "dp-adam"\nclip_norm = 0.5\n')
    options = ["--config", "a.toml", "--search", "momentum=0.8,0.9"]
    document = json.loads(call("sweep", *flags, *options, "--json").stdout)
    assert document["recipe"] == "dp-adam"
    assert set(document["search"]) == {"learning_rate", "clipping", "momentum"}
    assert "--set clip_norm=0.5" in document["command"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--search", "nonsense=1,2"], "no setting 'nonsense'"),
        (["--search", "learning_rate=log:1:0.1"], "is empty"),
        (["--search", "momentum=0,0.9", "--set", "momentum=0.5"], "fixed and searched"),
        (["--storage", "sqlite:////no/such/place/x.db"], "cannot be used"),
        (["--trials", "0"], "number of trials is 0"),
        (["--sampler", "grid"], "unknown sampler"),
        (["--repeats", "poisson"], "tuning is not counted"),
        (["--count-tuning", "--repeats", "flat"], "unknown law"),
        (["--count-tuning", "--sampler", "tpe"], "same law"),
        (["--count-tuning", "--accountant", "pld"], "only RDP"),
        (["--count-tuning", "--recipe", "non-private"], "nothing to count"),
        (["--count-tuning", "--unsafe-reproducible-noise", "1"], "nothing to count"),
        (["--validation-data", "digits"], "two kinds of validation"),
    ],
)
def test_refusals(call, flags, tmp_path, options, words):
    found = call("sweep", *flags, *options, code=2)
    assert words in " ".join(found.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_sweep_without_validation_is_refused(call, flags):
    at = flags.index("--validation")
    left = flags[:at] + flags[at + 3 :]
    assert "cannot open it" in " ".join(call("sweep", *left, code=2).stderr.split())


def test_a_folder_of_another_sweep_is_refused(call, flags):
    call("sweep", *flags)
    found = call("sweep", *flags, "--trials", "5", code=2)
    assert "made with other settings: trials is 3 there, and 5 here" in " ".join(
        found.stderr.split()
    )


def test_without_optuna_the_extra_is_named(call, flags, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert "curvedp[sweep]" in call("sweep", *flags, code=2).stderr
