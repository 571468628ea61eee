"""The tables' harness: stored results stay valid, and pages follow from results."""

import importlib
import json
import math
import statistics
import sys
from pathlib import Path

import pytest

from curvedp.recipes import get_recipe

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "accuracy"
PAGES = ROOT / "docs" / "results"
#: Bare names, which nothing else may meet in the list of imported modules.
NAMES = ("accuracy", "ablation", "arms", "images", "tables", "training")


@pytest.fixture(scope="module", autouse=True)
def modules():
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    while str(FOLDER) in sys.path:
        sys.path.remove(str(FOLDER))
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture
def accuracy(modules):
    return modules["accuracy"]


def stored(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def fill(accuracy, jobs_of, score, path):
    """Results of all jobs, and of those that they lead to."""
    done = accuracy.read(path)
    while missing := [j for j in jobs_of(done) if accuracy.key(j) not in done]:
        for job in missing:
            record = {"key": accuracy.key(job), **job, "accuracy": score(job),
                      "sigma": 1.5, "steps": 7, "seconds": 1.0}  # fmt: skip
            done[record["key"]] = record
    lines = [json.dumps(record) + "\n" for record in done.values()]
    path.write_text("".join(lines), encoding="utf-8")
    return done


def made_up(accuracy):
    """A number of the job's own; two arms differ by the same at every seed."""

    def score(job):
        own = int(accuracy.key({**job, "seed": 0}), 16) % 1000 / 10_000
        return 0.5 + own + 0.01 * (job["seed"] % 7)

    return score


@pytest.fixture
def results(accuracy, modules, tmp_path):
    """All tables complete, with made-up scores."""
    folder = tmp_path / "results"
    folder.mkdir()
    score, tables = made_up(accuracy), list(modules["arms"].TABLES)
    done = fill(accuracy, lambda d: accuracy.tuning_jobs(tables, d), score,
                folder / "tuning.jsonl")  # fmt: skip
    chosen = accuracy.choose(done)
    (folder / "chosen.json").write_text(json.dumps(chosen))
    fill(accuracy, lambda _: accuracy.test_jobs(chosen, tables), score,
         folder / "test.jsonl")  # fmt: skip
    ablation = modules["ablation"]
    fill(accuracy, lambda d: ablation.jobs(chosen, ablation.TABLES_OF, d, accuracy.key),
         score, folder / "ablation.jsonl")  # fmt: skip
    machine = {"device": "none", "torch": "0", "python": "0", "date": "today"}
    for page in modules["tables"].HEADS:
        (folder / accuracy.machine_file(page)).write_text(json.dumps(machine))
    return folder


# -- what is stored --------------------------------------------------------------------


def test_stored_results_are_those_of_the_tables(accuracy, modules):
    done = accuracy.read(FOLDER / "results" / "tuning.jsonl")
    tables = {record["table"] for record in done.values()}
    jobs = {accuracy.key(j) for j in accuracy.tuning_jobs(sorted(tables), done)}
    assert done.keys() <= jobs  # what is missing is run by the next call
    chosen = stored("results/chosen.json")
    assert accuracy.choose(done) == chosen
    tested = accuracy.read(FOLDER / "results" / "test.jsonl")
    tables = {record["table"] for record in tested.values()}
    jobs = {accuracy.key(j) for j in accuracy.test_jobs(chosen, sorted(tables))}
    assert tested.keys() <= jobs


def test_pages_are_those_of_the_stored_results(modules, tmp_path):
    modules["tables"].write(FOLDER / "results", tmp_path)
    written = list(tmp_path.iterdir())
    assert written
    for page in written:
        assert page.read_text() == (PAGES / page.name).read_text(), page.name


def test_every_noise_multiplier_is_there(modules):
    sigmas = stored("sigmas.json")
    training = modules["training"]
    for name, table in modules["arms"].TABLES.items():
        for size in training.sizes_of(table):
            for bands in training.bands_of(table):
                assert training.sigma_key(table, size, bands) in sigmas, name
                assert training.noise(table, size, bands)[0] > 0


# -- settings --------------------------------------------------------------------------


def test_every_trial_row_and_variant_is_a_recipe(accuracy, modules, results):
    arms, ablation = modules["arms"], modules["ablation"]
    chosen = json.loads((results / "chosen.json").read_text())
    settings = [s for t, about in arms.TABLES.items() for arm in about.arms
                for s in arms.trials(t, arm)]  # fmt: skip
    settings += [s for t in arms.TABLES for s in accuracy.rows(chosen, t).values()]
    for table in ablation.TABLES_OF:
        settings += ablation.variants(stored("results/chosen.json"), table).values()
    assert len(settings) > 200
    for own in settings:
        own = arms.usable(own)
        average = own.pop("average", None)
        recipe = get_recipe(own.pop("recipe")).configure(**own)
        if average is not None:
            found = modules["training"].averaged(recipe, average).facts()
            assert found == recipe.facts() | {"average_decay": average}
        mode = own.pop("mode", None)
        assert mode in (None, "paper")
        assert {k: recipe.facts()[k] for k in own} == own


def test_the_written_defaults_of_the_ablation_are_those_of_the_recipe(modules):
    facts = get_recipe("dp-kfc").facts()
    for name, value in modules["ablation"].DEFAULTS.items():
        assert facts[name] == value, name


def test_a_variant_differs_from_the_base_in_what_it_varies(modules):
    ablation = modules["ablation"]
    chosen = stored("results/chosen.json")
    allowed = {
        "probes": {"probe_size", "probe_batches"},
        "refresh": {"refresh", "decay"},
        "labels, both sides": {"side", "labels"},
        "back-map": {"back_map"},
        "spectral power": {"spectral_power"},
    }
    for table in ablation.TABLES_OF:
        own = ablation.base(chosen, table)
        same = 0
        for (what, label), settings in ablation.variants(chosen, table).items():
            if settings["recipe"] == "dp-sgd":
                assert settings.keys() == {"recipe", *ablation.PLAIN}
                continue
            assert settings.keys() == own.keys()
            changed = {name for name in own if own[name] != settings[name]}
            assert changed <= allowed.get(what, {what}), label
            same += not changed
        assert same >= 8  # the base is a value of most that is varied


def test_public_images_are_all_used_at_every_refresh(modules):
    arms, images = modules["arms"], modules["images"]
    assert arms.PROBES["probe_size"] == images.PUBLIC_IMAGES == arms.PUBLIC_IMAGES
    assert arms.PROBES["probe_batches"] == 1


# -- jobs ------------------------------------------------------------------------------


def test_tables_are_selected_by_name_page_or_beginning(accuracy, modules):
    every = accuracy.selected(None)
    assert every == list(modules["arms"].TABLES)
    assert accuracy.selected(["mnist"]) == [t for t in every if t.startswith("mnist")]
    assert len(accuracy.selected(["dp_ngd"])) == 5
    assert accuracy.selected(["cifar10 dp", "mnist strong baseline"]) == [
        "mnist strong baseline", "cifar10 dp-ngd epsilon 1", "cifar10 dp-ngd epsilon 2",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="no table is called svhn"):
        accuracy.selected(["svhn"])


def test_nothing_is_chosen_before_a_search_is_complete(accuracy, results):
    done = accuracy.read(results / "tuning.jsonl")
    chosen = accuracy.choose(done)
    record = next(r for r in done.values() if r["seed"] == 102)
    less = {k: r for k, r in done.items() if r != record}
    missing = accuracy.choose(less)
    assert record["arm"] in chosen[record["table"]]
    assert record["arm"] not in missing[record["table"]]


def test_settings_tuned_at_one_epsilon_are_tested_at_the_other(accuracy, results):
    chosen = json.loads((results / "chosen.json").read_text())
    first, second = (f"cifar10 dp-ngd epsilon {e}" for e in (1, 2))
    assert second not in chosen
    beside = accuracy.rows(chosen, first)
    own = accuracy.rows(chosen, second)
    assert own.items() < beside.items()
    loose = beside["dp-ngd public, no clamp"]
    assert loose == {**own["dp-ngd public"], "clamp": "none"}
    assert not accuracy.tuning_jobs([second], {})
    assert len(accuracy.test_jobs(chosen, [first])) == 7 * 3
    assert len(accuracy.test_jobs(chosen, [second])) == 5 * 3


def test_steps_are_searched_in_units_of_what_they_do(modules):
    arms = modules["arms"]
    table = "mnist rivals epsilon 1"
    for arm, about in arms.TABLES[table].arms.items():
        if "effective_step" not in about.searched:
            continue
        low, high = about.searched["effective_step"][1:]
        steps = [
            arms.effective_step(own, own["learning_rate"])
            for own in arms.trials(table, arm)[: about.trials]
        ]
        assert min(steps) < low * (high / low) ** (1 / 12) * 1.01, arm
        assert max(steps) > high / (high / low) ** (1 / 12) * 0.99, arm
        assert low * 0.99 <= min(steps) and max(steps) <= high * 1.01
    own = {"clip_norm": 2.0, "momentum": 0.9, "floor": 1e-6}
    assert arms.effective_step(own, 0.001) == pytest.approx(0.001 * 2 / 0.1 / 1e-3)


def test_a_row_that_is_not_tested_yet_says_so(modules, results, tmp_path):
    path = results / "test.jsonl"
    kept = [r for r in map(json.loads, path.read_text().splitlines())
            if (r["table"], r["arm"]) != ("mnist rivals epsilon 1", "gep")]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in kept))
    modules["tables"].write(results, tmp_path)
    text = (tmp_path / "rivals.md").read_text()
    assert text.count("| gep | not tested |") == 1
    assert text.count("| gep |") == 4


def test_a_grid_whose_best_is_at_its_end_is_continued(accuracy, modules, tmp_path):
    ablation = modules["ablation"]
    chosen = stored("results/chosen.json")
    table = ablation.TABLES_OF[0]
    base = ablation.base(chosen, table)

    def score(job):  # best at 16 times the base's rate, at any seed
        return 0.9 - abs(math.log2(job["settings"]["learning_rate"]
                                   / base["learning_rate"]) - 4) / 100  # fmt: skip

    done = fill(accuracy, lambda d: ablation.jobs(chosen, [table], d, accuracy.key),
                score, tmp_path / "found.jsonl")  # fmt: skip
    found = ablation.outcome(table, base, done, accuracy.key)
    assert found["factor"] == 16
    assert found["searched"] == (0.25, 32)
    assert found["by_seed"].keys() == {100, 101, 102}
    # the base is run once, though most groups have it
    rate = {"learning_rate": base["learning_rate"]}
    own = [r for r in done.values() if {**r["settings"], **rate} == base]
    assert len(own) == 8 + 2


def test_a_failure_is_no_result(accuracy, tmp_path, monkeypatch):
    job = {"table": "no such table", "arm": "", "phase": "tune", "seed": 0}
    record = accuracy._one((job, tmp_path, "cpu"))
    assert "failed" in record
    assert "accuracy" not in record


# -- pages -----------------------------------------------------------------------------


def test_every_page_has_its_tables_and_figures(accuracy, modules, results, tmp_path):
    pages = tmp_path / "pages"
    modules["tables"].write(results, pages)
    arms = modules["arms"]
    assert {p.stem for p in pages.iterdir()} == set(modules["tables"].HEADS)
    for table, about in arms.TABLES.items():
        text = (pages / f"{about.page}.md").read_text()
        part = text.partition(f"## {table}\n")[2].partition("\n## ")[0]
        for row in [*about.arms, *about.untuned]:
            assert f"\n| {row} | " in part
        assert f"epsilon {about.epsilon:g}" in part
        assert "Machine: none; torch 0, Python 0; today." in text
    tested = accuracy.read(results / "test.jsonl").values()
    name = "mnist strong baseline"
    kfc, sgd = ([100 * r["accuracy"] for r in tested
                 if r["table"] == name and r["arm"] == arm]
                for arm in ("dp-kfc", "dp-sgd"))  # fmt: skip
    above = statistics.mean(kfc) - statistics.mean(sgd)
    text = (pages / "strong_baseline.md").read_text().partition(f"## {name}\n")[2]
    line = next(x for x in text.splitlines() if x.startswith("| dp-kfc | "))
    assert f"| {statistics.mean(kfc):.2f} | {statistics.stdev(kfc):.2f} | 5 |" in line
    assert f"| {above:+.2f} +- 0.00 |" in line  # made-up differences have no spread
    assert "| 12 |" in line


def test_an_ablation_has_a_row_for_every_variant(modules, results, tmp_path):
    modules["tables"].write(results, tmp_path)
    text = (tmp_path / "ablation.md").read_text()
    for what, values in modules["ablation"].VARIED.items():
        for label in values:
            assert text.count(f"\n| {what} | {label} ") == 2, (what, label)
    assert "validation scores" in text


def test_an_incomplete_table_is_left_out(accuracy, modules, results, tmp_path):
    path = results / "test.jsonl"
    lines = path.read_text().splitlines()
    kept = [x for x in lines if json.loads(x)["table"] != "mnist strong baseline"
            or json.loads(x)["seed"] < 4]  # fmt: skip
    path.write_text("\n".join(kept))
    lines = (results / "ablation.jsonl").read_text().splitlines()
    (results / "ablation.jsonl").write_text("\n".join(lines[: len(lines) // 4]))
    modules["tables"].write(results, tmp_path)
    text = (tmp_path / "strong_baseline.md").read_text()
    assert "## fashion_mnist strong baseline" in text
    assert "## mnist strong baseline" not in text
    assert not (tmp_path / "ablation.md").exists()


def test_what_diverged_is_said(modules, results, tmp_path):
    path = results / "test.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["arm"] == "dp-ngd public, no clamp" and record["seed"] == 2:
            record["error"] = "not finite"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    modules["tables"].write(results, tmp_path)
    text = (tmp_path / "dp_ngd.md").read_text()
    assert text.count("Diverged: dp-ngd public, no clamp (seed 2).") == 3


def test_a_grid_has_every_combination_once(modules):
    arms = modules["arms"]
    table = "cifar10 correlated epsilon 1"
    for name, about in arms.TABLES[table].arms.items():
        found = arms.trials(table, name)
        assert len(found) == about.trials == 16
        assert len({json.dumps(own, sort_keys=True) for own in found}) == 16
        rates = sorted({own["learning_rate"] for own in found})
        edges = arms.inside(table, name, {**found[0], "learning_rate": rates[0]})
        assert not any(edges.values())


def test_trials_that_are_one_run_are_run_once(modules):
    accuracy, table = modules["accuracy"], "cifar10 correlated epsilon 2"
    jobs = {accuracy.key(job) for job in accuracy.tuning_jobs([table], {})}
    # three arms have one rate more; with one band, two arms of noisecurve are another
    assert len(jobs) == 5 * 16 + 3 * 4 - 2 * 5
    done = {key: {"accuracy": 0.1} for key in jobs}
    (best,) = [
        accuracy.key(job)
        for job in accuracy.tuning_jobs([table], {}, ["dp-bandmf"])
        if job["settings"]["bands"] == 1 and job["settings"]["learning_rate"] == 4.0
    ]
    done[best]["accuracy"] = 0.2
    chosen = accuracy.choose(done)[table]
    for arm in ("dp-bandmf", "noisecurve synthetic", "noisecurve public"):
        assert chosen[arm]["settings"]["bands"] == 1
        assert chosen[arm]["inside"] == {"learning_rate": True}
    assert chosen["dp-kfc+noisecurve"]["settings"]["recipe"] == "dp-kfc+noisecurve"
