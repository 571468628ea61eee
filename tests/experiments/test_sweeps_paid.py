"""What a sweep pays: for scores on private examples, and for the choice itself."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from curvedp.accounting import GaussianEvent, RDPAccountant, Repeats, read_ledger
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments import (
    load_trained,
    open_sweep,
    resume_sweep,
    sweep,
)
from curvedp.experiments.building import build_run
from curvedp.experiments.runs import evaluate_built
from curvedp.experiments.scores import paid_accuracy
from curvedp.train import LOSSES, evaluate

from .sweeping import make

# -- scores that are paid for ----------------------------------------------------------


def test_scores_on_private_examples_are_noisy_and_paid_for(private, tmp_path):
    config = make(replace(private, validation_is_public=False), trials=2)
    done = sweep(config, tmp_path / "sweep")
    noise = done.prepared.config.base.validation_noise
    plan = done.prepared.plan
    assert noise > 0 and "paid for" in done.to_json()["scores"]
    for row in done.rows:
        folder = tmp_path / "sweep" / "trials" / f"trial-{row.number:05d}"
        paid = read_ledger(folder / "score-ledger.jsonl")
        assert [p.event for p in paid.payments()] == [GaussianEvent(noise)]
        assert paid.epsilon() <= plan.epsilon()
        result = json.loads((folder / "result.json").read_text())
        assert set(result["metrics"]) == {"accuracy"}  # no exact loss beside it
        trained = load_trained(folder)
        built = replace(build_run(trained.config), model=trained.model)
        with pytest.raises(DataError, match="paid for"):  # nor a second look
            evaluate_built(built)
        # a whole number of right answers would be a miracle
        right = row.score * len(built.held_out)
        assert abs(right - round(right)) > 1e-9


def test_the_noise_on_a_score_is_as_large_as_paid_for(config, tmp_path):
    built = build_run(replace(config, validation=0.3, validation_noise=3.0))
    right = []
    for seed in range(80):  # the same model, other noise
        one = replace(
            built, config=replace(built.config, unsafe_reproducible_noise=seed)
        )
        (tmp_path / str(seed)).mkdir()
        score = paid_accuracy(one, tmp_path / str(seed))["accuracy"]
        right.append(score * len(built.held_out))
    exact = evaluate(built.model, built.held_out, LOSSES["cross-entropy"])["accuracy"]
    assert abs(np.mean(right) - exact * len(built.held_out)) < 5 * 3 / math.sqrt(80)
    assert 2.2 < np.std(right, ddof=1) < 3.9


def test_a_paid_score_needs_right_answers(private, tmp_path):
    config = replace(private, validation_is_public=False, metrics=("loss",))
    with pytest.raises(ConfigurationError, match="right answers"):
        sweep(make(config), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_validation_data_of_its_own(private, blobs, tmp_path):
    with np.load(blobs) as arrays:
        np.savez(tmp_path / "pub.npz", x=arrays["x_test"], y=arrays["y_test"])
    own = replace(
        private,
        validation=None,
        validation_is_public=False,
        validation_data=str(tmp_path / "pub.npz"),
        validation_data_options={"num_classes": 3},
    )
    done = sweep(make(own, trials=2), tmp_path / "sweep")
    assert done.split == "public validation"
    assert done.prepared.config.base.validation_noise is None
    notes = done.facts["notes"]
    assert any("pub.npz, which was declared public" in note for note in notes)
    other = replace(own, validation_data_options={"num_classes": 4})
    with pytest.raises(DataError, match="4 outputs"):
        sweep(make(other), tmp_path / "other")
    itself = replace(own, validation_data=str(blobs))
    with pytest.raises(ConfigurationError, match="private data itself"):
        sweep(make(itself), tmp_path / "other")


# -- what is said about epsilon --------------------------------------------------------


def test_without_counting_everything_says_so(private, tmp_path):
    done = sweep(make(private, trials=3), tmp_path / "sweep")
    document = done.to_json()
    assert not document["tuning_counted"]
    assert "not counted in epsilon" in document["tuning"]
    assert any("not counted" in note for note in document["statement"]["notes"])
    ledger = read_ledger(done.best_dir / "ledger.jsonl")
    assert any("not counted" in note for note in ledger.notes())
    assert done.epsilon_of_all > document["epsilon"]
    assert not (tmp_path / "sweep" / "ledger.jsonl").exists()


def test_what_is_not_private_says_so(base, tmp_path):
    done = sweep(make(base, trials=2), tmp_path / "sweep")
    document = done.to_json()
    assert document["label"] == "NOT PRIVATE" and document["epsilon"] is None
    reference = replace(base, recipe="non-private", unsafe_reproducible_noise=None)
    document = sweep(make(reference, trials=2), tmp_path / "other").to_json()
    assert document["label"] == "NOT PRIVATE" and document["best"]["score"] > 0


# -- counted ---------------------------------------------------------------------------


def counted(private, trials=2, law="geometric", **privacy):
    return make(
        replace(private, privacy={**private.privacy, **privacy}), trials, law=law
    )


def test_the_total_is_repeat_and_select_and_stays_inside_the_budget(private, tmp_path):
    privacy = {k: v for k, v in private.privacy.items() if k != "noise_multiplier"}
    base = replace(private, validation_is_public=False, privacy=privacy)
    done = sweep(counted(base, epsilon=4.0), tmp_path / "sweep")
    total = done.to_json()["epsilon"]
    assert 3.99 < total <= 4.0 and done.counted
    assert done.facts["epsilon"] == total > done.facts["epsilon_of_one_trial"]
    for name in ("ledger.jsonl", "score-ledger.jsonl"):
        ledger = read_ledger(tmp_path / "sweep" / name)
        assert ledger.count() == 1 and ledger.header.target_epsilon == 4.0
        assert 3.9 < ledger.epsilon() <= 4.0
    again = resume_sweep(tmp_path / "sweep").work()
    assert again.to_json() == done.to_json()
    assert read_ledger(tmp_path / "sweep" / "ledger.jsonl").count() == 1


def test_with_given_noise_the_total_follows(private, tmp_path):
    done = sweep(counted(private, law="logarithmic", trials=3), tmp_path / "sweep")
    plan = done.prepared.plan
    event = Repeats(3, "logarithmic").event(
        read_ledger(tmp_path / "sweep" / "ledger.jsonl").payments()[0].event.event
    )
    expected = RDPAccountant().epsilon(event, plan.relation, plan.delta)
    assert done.to_json()["epsilon"] == expected > plan.epsilon()


def test_only_the_best_trial_comes_out(private, tmp_path, monkeypatch):
    monkeypatch.setattr(Repeats, "draw", lambda self: 4)
    done = sweep(counted(private, trials=3), tmp_path / "sweep")
    document = done.to_json()
    assert done.rows == [] and "trials" not in document
    assert "trial" not in document["best"]
    best = tmp_path / "sweep" / "best"
    assert done.best_dir == best
    text = json.dumps(document)
    for path in (*best.glob("*.json"), tmp_path / "sweep" / "sweep.json"):
        text += path.read_text()
    assert "trial-0000" not in text
    assert len(list((tmp_path / "sweep" / "trials").glob("trial-*"))) == 4
    stored = json.loads((best / "result.json").read_text())
    assert stored["epsilon"] == document["epsilon"]
    assert load_trained(best).step == 8


def test_the_number_of_trials_is_drawn_once_and_before_the_first(
    private, tmp_path, monkeypatch
):
    drawn = []

    def draw(self):
        drawn.append(len(list((tmp_path / "sweep").rglob("trial-*"))))
        return 2

    monkeypatch.setattr(Repeats, "draw", draw)
    config = counted(private, trials=3)
    open_sweep(config, tmp_path / "sweep")  # ... and the process is killed
    resume_sweep(tmp_path / "sweep").work()
    resume_sweep(tmp_path / "sweep").work()
    assert drawn == [0]
    assert len(list((tmp_path / "sweep" / "trials").glob("trial-*"))) == 2


def test_no_trial_at_all_is_an_outcome(private, tmp_path, monkeypatch):
    monkeypatch.setattr(Repeats, "draw", lambda self: 0)
    done = sweep(counted(private, law="poisson"), tmp_path / "sweep")
    assert done.best is None and done.to_json()["best"] is None
    assert read_ledger(tmp_path / "sweep" / "ledger.jsonl").count() == 1


def test_settings_of_counted_trials_come_from_fresh_entropy(private, tmp_path):
    config = counted(private)
    rates = set()
    for name in ("one", "two"):  # the same seed, the same trial
        with open_sweep(config, tmp_path / name).study.claimed() as claim:
            rates.add(claim.settings["learning_rate"])
    assert len(rates) == 2


def test_equal_scores_are_not_decided_by_the_number(private, tmp_path):
    from curvedp.experiments.sweeps.results import _rank
    from curvedp.experiments.sweeps.study import Trial

    prepared = open_sweep(counted(private), tmp_path / "sweep").prepared
    trials = [
        Trial(n, "finished", {}, 0.5, None, extra={"run_id": name})
        for n, name in enumerate(["b", "c", "a"])
    ]
    assert max(trials, key=lambda t: _rank(t, prepared)).number == 1


def test_what_cannot_be_counted_is_refused(base, private, tmp_path):
    with pytest.raises(ConfigurationError, match="same law"):
        make(private, sampler="tpe", law="geometric")
    with pytest.raises(ConfigurationError, match="nothing to count"):
        make(base, law="geometric")
    with pytest.raises(ConfigurationError, match="only RDP"):
        counted(private, accountant="pld")
    with pytest.raises(ConfigurationError, match="replace-one"):
        sweep(counted(private, relation="replace-one"), tmp_path / "sweep")
    with pytest.raises(ConfigurationError, match="budget is"):
        cheap = replace(private, validation_is_public=False, validation_noise=0.5)
        privacy = {k: v for k, v in private.privacy.items() if k != "noise_multiplier"}
        sweep(counted(replace(cheap, privacy=privacy), epsilon=3.0), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
