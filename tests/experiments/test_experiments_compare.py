import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from curvedp.accounting import read_ledger
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments import (
    CompareConfig,
    StopRequest,
    compare,
    is_comparison,
    plot_comparison,
    resume_comparison,
)

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def comparison(config):
    return CompareConfig(config, ("dp-sgd", "non-private"), seeds=2)


def strip(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_rows_say_what_they_are(comparison, tmp_path):
    done = compare(comparison, tmp_path / "c")
    private, reference = done.rows
    values = [r.metrics["accuracy"] for r in done.runs["dp-sgd"]]
    assert private["accuracy_mean"] == pytest.approx(np.mean(values))
    assert private["accuracy_std"] == pytest.approx(np.std(values, ddof=1))
    assert private["relation"] == "zero-out"
    assert private["sigma"] == 2.0
    assert private["steps"] == reference["steps"] == 12
    assert reference["epsilon"] is None
    assert reference["label"] == "NOT PRIVATE"
    spent = [read_ledger(r.run_dir / "ledger.jsonl") for r in done.runs["dp-sgd"]]
    assert private["epsilon_of_all_runs"] > max(s.epsilon() for s in spent)


def test_seeds_are_paired_across_recipes_and_differ_within_one(comparison):
    first, second = (comparison.run_config("dp-sgd", k) for k in (0, 1))
    assert first.seed != second.seed
    assert first.unsafe_reproducible_noise != second.unsafe_reproducible_noise
    assert comparison.run_config("non-private", 1).seed == second.seed


def test_a_stopped_comparison_goes_on_to_the_same_rows(comparison, tmp_path):
    whole = compare(comparison, tmp_path / "whole")
    stop = StopRequest()

    def interrupt(recipe, index, progress):
        if (recipe, index, progress.step) == ("dp-sgd", 1, 5):
            stop()

    stopped = compare(comparison, tmp_path / "c", on_progress=interrupt, stop=stop)
    assert stopped is None
    assert is_comparison(tmp_path / "c")
    assert not (tmp_path / "c" / "compare.json").exists()
    assert strip(resume_comparison(tmp_path / "c").rows) == strip(whole.rows)


def test_nothing_is_trained_if_one_recipe_is_refused(comparison, tmp_path):
    base = replace(comparison.base, privacy={"batch_size": 30, "epochs": 4})
    with pytest.raises(ConfigurationError, match="epsilon"):
        # the reference alone would be fine without an epsilon
        compare(
            replace(comparison, base=base, recipes=("non-private", "dp-sgd")),
            tmp_path / "c",
        )
    assert not (tmp_path / "c").exists()


def test_config_round_trip(comparison):
    stored = json.loads(json.dumps(comparison.to_json()))
    assert CompareConfig.from_json(stored) == comparison


def test_held_out_examples_are_needed(comparison, tmp_path, blobs):
    arrays = np.load(blobs)
    np.savez(blobs, x=arrays["x_train"], y=arrays["y_train"])
    with pytest.raises(DataError, match="release"):
        compare(comparison, tmp_path / "c")
    base = replace(comparison.base, validation=0.3)
    base = replace(base, privacy={**base.privacy, "batch_size": 20})
    done = compare(replace(comparison, base=base), tmp_path / "d")
    assert done.rows[0]["metrics_computed_on"] == "validation"


def test_plots_are_pictures(comparison, tmp_path):
    done = compare(comparison, tmp_path / "c")
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path = plot_comparison(done, tmp_path / f"plot{suffix}", data="blobs")
        assert path.read_bytes().startswith(start)
    diverged = replace(
        done,
        rows=[{**row, "accuracy_mean": float("nan")} for row in done.rows],
    )
    plot_comparison(diverged, tmp_path / "empty.png")


def test_plots_without_matplotlib_name_the_extra(comparison, tmp_path, monkeypatch):
    done = compare(replace(comparison, seeds=1), tmp_path / "c")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"curvedp\[plots\]"):
        plot_comparison(done, tmp_path / "plot.png")


def test_the_demo_runs_and_can_be_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    demo = runpy.run_path(str(DEMO))
    quick = replace(demo["CONFIG"].base, privacy={"noise_multiplier": 2.0, "epochs": 1})
    demo["main"].__globals__["CONFIG"] = replace(demo["CONFIG"], base=quick, seeds=1)
    for _ in range(2):
        assert demo["main"]() == 0
    shown = capsys.readouterr().out
    assert "NOT PRIVATE" in shown
    assert "Privacy statement" in shown
    for name in ("plot.png", "compare.json", "statement.txt"):
        assert (tmp_path / "demo" / name).stat().st_size > 0
