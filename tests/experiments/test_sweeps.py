"""Sweeps: what is searched, how trials are judged, what is refused, what is paid."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from curvedp import data
from curvedp.accounting import GaussianEvent, RDPAccountant, Repeats, read_ledger
from curvedp.cli.options import read_value
from curvedp.data import npz
from curvedp.errors import ConfigurationError, DataError, StorageError
from curvedp.experiments import (
    RunConfig,
    SweepConfig,
    load_trained,
    open_sweep,
    resume_sweep,
    sweep,
)
from curvedp.experiments.building import build_run
from curvedp.experiments.runs import StopRequest, evaluate_built
from curvedp.experiments.scores import paid_accuracy
from curvedp.experiments.sweeps.config import parse_search
from curvedp.experiments.sweeps.results import train_command
from curvedp.experiments.sweeps.study import default_storage, hidden
from curvedp.recipes import RECIPES, Choice, Range, Recipe
from curvedp.train import LOSSES, evaluate

SPACE = {"learning_rate": Range(0.1, 1.0, log=True), "clipping": Choice(("flat",))}


@pytest.fixture
def base(config):
    """Judged by a share that is declared public, so that scores are exact."""
    return replace(config, validation=0.3, validation_is_public=True)


@pytest.fixture
def private(base):
    return replace(base, unsafe_reproducible_noise=None)


def make(base, trials=3, **options):
    fixed = {k: v for k, v in base.recipe_settings.items() if k != "learning_rate"}
    base = replace(base, recipe_settings=fixed)
    return SweepConfig.make(base, SPACE, trials=trials, **options)


# -- search spaces ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda r: r.name)
def test_what_recipes_declare_is_accepted_by_them(recipe):
    modes = [None, *recipe.modes]
    for mode in modes:
        space = recipe.search_space(mode)
        assert "learning_rate" in space
        for name, where in space.items():
            for value in where.edges():
                recipe.configure(mode=mode, **{name: value})


def test_the_default_learning_rate_lies_inside_its_range():
    for recipe in RECIPES.values():
        where = recipe.search_space()["learning_rate"]
        assert where.low < recipe.learning_rate < where.high, recipe.name


def test_dp_sgd_searches_what_makes_it_strong():
    space = RECIPES["dp-sgd"].search_space()
    assert set(space) >= {"learning_rate", "momentum", "clipping", "clip_norm"}
    assert set(space["clipping"].values) == {"flat", "normalised"}


def test_a_recipe_that_declares_nothing_has_its_rate_searched():
    space = Recipe("mine", "", learning_rate=0.2).search_space()
    assert space == {"learning_rate": Range(0.02, 2.0, log=True)}
    with pytest.raises(ConfigurationError, match="no setting"):
        Recipe("mine", "", search={"nonsense": Range(0, 1)})


def test_search_on_the_command_line():
    texts = ["a=log:0.01:1", "b=linear:0:0.9", "c=flat,normalised", "d=1,2", "e=true"]
    found = parse_search(texts, read_value)
    assert found == {
        "a": Range(0.01, 1, log=True),
        "b": Range(0, 0.9),
        "c": Choice(("flat", "normalised")),
        "d": Choice((1, 2)),
        "e": Choice((True,)),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate", "write NAME="),
        ("=1,2", "write NAME="),
        ("a=cubic:0:1", "neither a range nor a choice"),
        ("a=log:1", "neither a range nor a choice"),
        ("a=log:1:0.1", "empty"),
        ("a=log:1:1", "empty"),
        ("a=log:0:1", "logarithm"),
        ("a=linear:x:1", "no number"),
        ("a=flat,flat", "named twice"),
    ],
)
def test_searches_that_mean_nothing_are_refused(text, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_search([text], read_value)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"nonsense": Range(0, 1)}, "has no setting 'nonsense'"),
        ({"clipping": Range(0, 1)}, "is no number"),
        ({"clipping": Choice(("flat", "square"))}, "square"),
        ({"learning_rate": Range(-1.0, 1.0)}, "learning_rate"),
    ],
)
def test_searches_that_do_not_fit_the_recipe_are_refused(base, space, words):
    with pytest.raises(ConfigurationError, match=words):
        SweepConfig.make(replace(base, recipe_settings={}), space)


def test_whole_numbers_have_ranges_of_whole_numbers(base):
    kfc = replace(base, recipe="dp-kfc", recipe_settings={})
    with pytest.raises(ConfigurationError, match="whole number"):
        SweepConfig.make(kfc, {"rank": Range(1.5, 8)})
    assert "rank" in SweepConfig.make(kfc, {"rank": Range(1, 8)}).search


def test_what_is_fixed_is_not_searched(base):
    made = SweepConfig.make(base)
    assert "learning_rate" not in made.search and "momentum" in made.search
    with pytest.raises(ConfigurationError, match="fixed and searched"):
        SweepConfig.make(base, {"learning_rate": Range(0.1, 1)})


# -- the test part ---------------------------------------------------------------------


@pytest.mark.parametrize("probe", ["releases", "private"])
def test_what_has_no_effect_beside_what_is_fixed_is_not_searched(base, probe):
    whitened = replace(base, recipe="dp-kfc", recipe_settings={})
    assert "spectral_power" in SweepConfig.make(whitened).search
    other = replace(whitened, recipe_settings={"probe": probe, "refresh": 5})
    found = SweepConfig.make(other).search
    assert "spectral_power" not in found
    assert {"learning_rate", "damping"} <= found.keys()


def test_a_sweep_needs_no_test_file_and_never_names_it(base, blobs, tmp_path):
    with np.load(blobs) as arrays:
        np.savez(tmp_path / "only.npz", x=arrays["x_train"], y=arrays["y_train"])
    missing = str(tmp_path / "secret-test.npz")
    options = {"num_classes": 3, "test": missing}
    base = replace(base, data=str(tmp_path / "only.npz"), data_options=options)
    done = sweep(make(base), tmp_path / "sweep")
    assert len(done.rows) == 3 and done.split == "validation"
    texts = [p.read_text() for p in (tmp_path / "sweep").rglob("*.json*")]
    assert texts and not any("secret-test" in text for text in texts)
    with pytest.raises(DataError):  # and the file is not there for anybody
        data.load(base.data, **options)


def test_a_loader_that_refuses_the_test_part_is_never_asked(
    base, tmp_path, monkeypatch
):
    original = npz._read_member

    def refusing(path, archive, member):
        assert "test" not in member.filename, "the test part was read"
        return original(path, archive, member)

    monkeypatch.setattr(npz, "_read_member", refusing)
    assert sweep(make(base), tmp_path / "sweep").best is not None
    with pytest.raises(AssertionError, match="was read"):  # the patch is in its place
        data.load(base.data, **base.data_options)


def test_without_validation_a_sweep_is_refused(config):
    with pytest.raises(ConfigurationError, match="--validation"):
        make(config)


def test_the_test_file_is_no_validation_data(config, tmp_path):
    test = tmp_path / "test.npz"
    np.savez(test, x=np.zeros((3, 6), np.float32), y=np.zeros(3, int))
    config = replace(
        config, validation_data=str(test), data_options={"num_classes": 3, "test": test}
    )
    with pytest.raises(ConfigurationError, match="is the test file"):
        make(config)


# -- trials ----------------------------------------------------------------------------


def test_every_trial_is_a_run_and_the_best_is_the_best(base, tmp_path):
    done = sweep(make(base, trials=5), tmp_path / "sweep")
    assert sorted(row.number for row in done.rows) == [0, 1, 2, 3, 4]
    scores = [row.score for row in done.rows]
    assert scores == sorted(scores, reverse=True)
    assert done.best == done.rows[0]
    for row in done.rows:
        folder = tmp_path / "sweep" / "trials" / f"trial-{row.number:05d}"
        assert read_ledger(folder / "ledger.jsonl").count() == 8
        stored = json.loads((folder / "run.json").read_text())["config"]
        assert stored["recipe_settings"] == dict(row.settings)
        assert stored["seed"] == base.seed
        result = json.loads((folder / "result.json").read_text())
        assert result["metrics"]["accuracy"] == row.score
    assert len({row.settings["learning_rate"] for row in done.rows}) == 5
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]


def test_a_loss_is_minimised(base, tmp_path):
    done = sweep(make(replace(base, metrics=("loss",))), tmp_path / "sweep")
    assert done.best.score == min(row.score for row in done.rows)


def test_trials_whose_settings_do_not_go_together_are_refused(base, tmp_path):
    kfc = replace(
        base, recipe="dp-kfc", recipe_settings={"learning_rate": 0.1, "diagonal": True}
    )
    space = {"rank": Choice((32, 4))}  # a diagonal map has no rank but the default
    config = SweepConfig.make(kfc, space, trials=6, sampler="random")
    config = replace(config, search=space)
    done = sweep(config, tmp_path / "sweep")
    states = {row.settings["rank"]: row.state for row in done.rows}
    assert states == {32: "finished", 4: "refused"}
    assert any("no effect" in row.reason for row in done.rows)
    assert done.best.settings["rank"] == 32


def test_a_finished_sweep_gives_its_result_again(base, tmp_path):
    first = sweep(make(base), tmp_path / "sweep")
    again = resume_sweep(tmp_path / "sweep").work()
    assert again.to_json() == first.to_json()
    helped = sweep(make(base), tmp_path / "sweep")  # the same command once more
    assert helped.to_json() == first.to_json()


def test_another_sweep_does_not_go_into_the_folder(base, tmp_path):
    sweep(make(base, trials=2), tmp_path / "sweep")
    for other, words in (
        (make(base, trials=4), "trials is 2 there, and 4 here"),
        (make(replace(base, seed=9), trials=2), "seed"),
        (make(base, trials=2, sampler="random"), "sampler"),
        (make(replace(base, recipe="dp-adam"), trials=2), "recipe"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            sweep(other, tmp_path / "sweep")
    with pytest.raises(ConfigurationError, match="exists already"):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "file").touch()
        sweep(make(base), tmp_path / "mine")


def test_a_shared_storage_joins_two_folders(base, tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    one = open_sweep(make(base, trials=4), tmp_path / "one", storage=url)
    two = open_sweep(
        make(replace(base, seed=77), trials=4),  # a seed that nobody asked for
        tmp_path / "two",
        storage=url,
        seed_is_given=False,
    )
    assert two.prepared.config.base.seed == base.seed
    with two.study.claimed() as claim, one.study.claimed() as other:
        assert claim.number != other.number  # what runs elsewhere is left alone
        two._run(claim, None, StopRequest())
    done = one.work()
    places = {row.place.rsplit("/", 1)[1] for row in done.rows}
    assert places == {"one", "two"} and len(done.rows) == 4
    assert not list((tmp_path / "one").glob("study.db"))


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////no/such/folder/study.db",
        "nonsense",
        "nosuchdatabase://here",
        "postgresql+nosuchdriver://me:hush@here/x",
    ],
)
def test_a_storage_that_cannot_be_opened(base, tmp_path, url):
    with pytest.raises(StorageError, match="cannot be used") as refused:
        sweep(make(base), tmp_path / "sweep", storage=url)
    assert "hush" not in str(refused.value)
    assert not (tmp_path / "sweep").exists()


def test_passwords_are_hidden():
    assert hidden("mysql://me:hush@host/db") == "mysql://me:***@host/db"
    assert hidden("sqlite:///a.db") == "sqlite:///a.db"


def test_a_study_of_somebody_else_is_not_touched(base, tmp_path, monkeypatch):
    import optuna

    from curvedp.experiments.sweeps import study as module

    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    url = f"sqlite:///{tmp_path / 'other.db'}"
    optuna.create_study(storage=url, study_name="mine")
    with pytest.raises(ConfigurationError, match="not made by curvedp sweep"):
        sweep(make(base), tmp_path / "sweep", storage=url, study="mine")


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


# -- the command of the best -----------------------------------------------------------


def test_the_printed_command_trains_the_best(private, tmp_path):
    import shlex

    from typer.testing import CliRunner

    from curvedp.cli.app import app

    config = replace(private, model_options={}, privacy={**private.privacy})
    words = shlex.split(train_command(config, {"learning_rate": 0.25}))
    assert words[:2] == ["curvedp", "train"]
    run = tmp_path / "run"
    done = CliRunner().invoke(
        app, [*words[1:], "--run-dir", str(run), "--device", "cpu", "--json"]
    )
    assert done.exit_code == 0, done.output
    stored = RunConfig.from_json(json.loads((run / "run.json").read_text())["config"])
    assert stored.recipe_settings["learning_rate"] == 0.25
    assert stored.validation is None
    assert {k: stored.privacy[k] for k in private.privacy} == dict(private.privacy)


def test_default_storage_is_in_the_folder(tmp_path):
    assert default_storage(tmp_path) == f"sqlite:///{tmp_path}/study.db"
