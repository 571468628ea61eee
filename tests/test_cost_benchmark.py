"""The parts of the cost benchmarks that decide something, without a measurement."""

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def load():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    while str(BENCHMARKS) in sys.path:
        sys.path.remove(str(BENCHMARKS))
    for name in [
        n
        for n in sys.modules
        if n.split(".")[0] in ("cost", "scaling", "on_gpu", "counted_memory")
    ]:
        del sys.modules[name]


def memory(rows):
    """MiB of a batch: a fixed part, and a little more than a line."""
    return 100 + 2 * rows + 1e-4 * rows**2


@pytest.mark.parametrize("limit", [90, 120, 150, 1000, 5000, 1e9])
def test_the_largest_batch_is_found_in_few_probes(load, limit):
    largest = load("cost.largest")
    probes = {}

    def fits(rows):
        probes[str(rows)] = memory(rows)
        return memory(rows) <= limit

    found = largest._search(fits, probes, 8, limit)
    fitting = max((n for n in range(20_000) if memory(n) <= limit), default=0)
    if limit < 1e9:
        assert memory(found) <= limit or found == 0
        assert fitting <= max(found * 1.03, found + 1)
        assert len(probes) <= 16
    else:
        assert found >= largest.MOST  # nobody needs more


def test_a_search_that_was_broken_off_goes_on(load, monkeypatch):
    largest, nets = load("cost.largest"), load("cost.nets")
    asked, kept = [], []

    def probe(net, *_):
        asked.append(net.batch)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return memory(net.batch)

    monkeypatch.setattr(largest, "_probe", probe)
    monkeypatch.setattr(largest, "check", lambda *_: None)
    row = {}

    def search():
        net = nets.CELLS["cpu"]["lstm"]
        largest.find_largest(
            net, "curvedp", "cpu", 800, row, lambda: kept.append(1), ""
        )

    with pytest.raises(KeyboardInterrupt):
        search()
    assert len(row["probes"]) == 3
    search()
    assert len(set(asked)) == len(asked) - 1  # only the one that was broken off
    assert memory(row["rows"]) <= 800 and kept
    count = len(asked)
    search()
    assert len(asked) == count


def test_exponents_are_slopes_of_logarithms(load):
    exponent = load("scaling").exponent
    assert exponent([1, 2, 4, 8], [3 * n**1.5 for n in (1, 2, 4, 8)]) == pytest.approx(
        1.5
    )


def test_a_page_keeps_what_stands_around_the_marks(load, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n")
    reporting = load("cost.reporting")
    reporting.between_marks(page, "x", "new")
    text = page.read_text()
    assert text == "before\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nafter\n"
    with pytest.raises(SystemExit):
        reporting.between_marks(page, "y", "new")


def test_the_nets_that_are_promised_are_there(load):
    cells = load("cost.nets").CELLS
    wanted = {
        "dpkfc-mnist", "wrn-16-4", "resnet-20", "vit-6x384", "vit-b", "bert-base",
        "lstm",
    }  # fmt: skip
    for device in ("cpu", "cuda"):
        assert wanted <= cells[device].keys()


def test_memory_is_counted_with_what_takes_it(load):
    memory, nets = load("counted_memory"), load("cost.nets")
    before = dict(memory.passes.REMADE_FROM)
    net = replace(nets.CELLS["cuda"]["dpkfc-mnist"], batch=6)
    plain, ours = (memory.count(net, name) for name in ("non-private", "curvedp"))
    # a result of the first layer and its copy, and the weights' gradients
    least = (2 * 6 * 16 * 28 * 28 + 206_922) * 4 / 2**20
    assert least < plain["peak_mib"] < 3 * least
    assert sum(plain["at_peak_mib"].values()) <= plain["peak_mib"] * 1.05
    assert 0.5 < ours["peak_mib"] / plain["peak_mib"] < 3
    assert before == memory.passes.REMADE_FROM
    row = {"net": net.name, "batch": 6, "contestant": "curvedp", "date": ""} | ours
    ghost = row | {"contestant": "opacus ghost", "peak_mib": 2 * ours["peak_mib"]}
    told = memory.table({"rows": [row, ghost], "torch": "", "opacus": "", "python": ""})
    assert f"| curvedp | {ours['peak_mib']:.0f} |" in told and "| 0.50 |" in told


def test_jobs_for_a_gpu_are_scripts_and_nets_that_exist(load):
    on_gpu, nets = load("on_gpu"), load("cost.nets")
    for job in on_gpu.JOBS:
        assert (BENCHMARKS / job.script).exists()
        if "--nets" in job.arguments:
            named = job.arguments[job.arguments.index("--nets") + 1 :]
            assert set(named) <= nets.CELLS["cuda"].keys()
    timed = [j for j in on_gpu.JOBS if j.limited]
    assert {n for j in timed for n in j.arguments[3:]} == nets.CELLS["cuda"].keys()


@pytest.fixture
def jobs(load, tmp_path, monkeypatch):
    """The runner in a folder with scripts of its own."""
    on_gpu = load("on_gpu")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.json").write_text("old")
    (tmp_path / "good.py").write_text("import sys; print('found', *sys.argv[1:])")
    (tmp_path / "bad.py").write_text("print('half'); raise SystemExit(3)")
    (tmp_path / "slow.py").write_text("import time; print('half'); time.sleep(60)")
    monkeypatch.setattr(on_gpu, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(on_gpu, "RESULTS", tmp_path / "results")
    return on_gpu, tmp_path / "results"


def test_a_job_that_ends_writes_its_file_and_others_leave_the_old_one(jobs):
    on_gpu, results = jobs
    job = on_gpu.Job("good.py", ("--all",), "old.json", limited=True, needs=10)
    assert on_gpu.run(job, left=40)
    assert (results / "old.json").read_text() == "found --all --seconds 30\n"
    for script, left in (("bad.py", 40), ("slow.py", 1.0), ("good.py", 0.5)):
        job = on_gpu.Job(script, (), "old.json", needs=0.6)
        assert not on_gpu.run(job, left=left)
        assert (results / "old.json").read_text().startswith("found --all")


def test_what_was_written_is_gathered(jobs, monkeypatch, tmp_path):
    on_gpu, results = jobs
    os.utime(results / "old.json", (0, 0))
    chosen = (on_gpu.Job("good.py", (), "new.json"), on_gpu.Job("bad.py"))
    monkeypatch.setattr(on_gpu, "JOBS", chosen)
    copies = tmp_path / "copies"
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--copy-to", str(copies)])
    assert on_gpu.main() == 1  # one of them failed
    assert [p.name for p in copies.iterdir()] == ["new.json"]
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--only", "good"])
    assert on_gpu.main() == 0
