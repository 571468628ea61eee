"""Sweeps: trials are runs, studies are shared, the best one is told."""

import contextlib
import json
import sqlite3
from dataclasses import replace

import pytest

from curvedp.accounting import read_ledger
from curvedp.errors import ConfigurationError, StorageError
from curvedp.experiments import (
    RunConfig,
    SweepConfig,
    open_sweep,
    resume_sweep,
    sweep,
)
from curvedp.experiments.runs import StopRequest
from curvedp.experiments.sweeps.files import refuse_foreign_file
from curvedp.experiments.sweeps.results import train_command
from curvedp.experiments.sweeps.study import default_storage, hidden
from curvedp.recipes import Choice

from .sweeping import make

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
    url = "postgresql://host/db?user=me&password=hush&ssl=1"
    assert hidden(url) == "postgresql://host/db?user=me&password=***&ssl=1"


def test_a_study_of_somebody_else_is_not_touched(base, tmp_path, monkeypatch):
    import optuna

    from curvedp.experiments.sweeps import study as module

    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    url = f"sqlite:///{tmp_path / 'other.db'}"
    optuna.create_study(storage=url, study_name="mine")
    with pytest.raises(ConfigurationError, match="not made by curvedp sweep"):
        sweep(make(base), tmp_path / "sweep", storage=url, study="mine")


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


def test_the_printed_command_trains_on_the_same_views_in_the_same_precision(private):
    import shlex

    import typer

    from curvedp.cli.app import app

    asked = {
        "--augment": "flips-and-crops",
        "--views": "4",
        "--precision": "bf16",
        "--norm-precision": "float32",
    }
    config = replace(
        private,
        augment="flips-and-crops",
        views=4,
        precision="bf16",
        norm_precision="float32",
    )
    words = shlex.split(train_command(config, {}))
    assert {flag: words[words.index(flag) + 1] for flag in asked} == asked
    train = typer.main.get_command(app).commands["train"]
    assert asked.keys() <= {flag for p in train.params for flag in p.opts}
    plain = shlex.split(train_command(private, {}))
    assert not asked.keys() & set(plain)


def test_default_storage_is_in_the_folder(tmp_path):
    assert default_storage(tmp_path) == f"sqlite:///{tmp_path}/study.db"


@pytest.mark.parametrize("made", range(14))
def test_a_study_whose_tables_were_begun_is_gone_on_with(tmp_path, made):
    """Optuna makes them one after the other, and a kill comes between any two."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    whole, begun = tmp_path / "whole.db", tmp_path / "begun.db"
    optuna.storages.RDBStorage(f"sqlite:///{whole}")
    with contextlib.closing(sqlite3.connect(whole)) as database:
        tables = database.execute(
            "select sql from sqlite_master where type = 'table' order by rowid"
        ).fetchall()
    assert len(tables) >= 13
    with contextlib.closing(sqlite3.connect(begun)) as database:
        for (sql,) in tables[:made]:
            database.execute(sql)
        database.commit()
    refuse_foreign_file(f"sqlite:///{begun}")
    optuna.create_study(storage=f"sqlite:///{begun}", study_name="goes-on")


def test_a_database_of_something_else_is_refused(tmp_path):
    file = tmp_path / "customers.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        for name in ("studies", "customers"):  # one of optuna's names by chance
            database.execute(f"create table {name} (name text)")
        database.commit()
    with pytest.raises(StorageError, match="something else"):
        refuse_foreign_file(f"sqlite:///{file}")
