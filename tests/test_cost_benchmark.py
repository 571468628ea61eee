"""The parts of the cost benchmarks that decide something, without a measurement."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def load():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    while str(BENCHMARKS) in sys.path:
        sys.path.remove(str(BENCHMARKS))
    for name in [n for n in sys.modules if n.split(".")[0] in ("cost", "scaling")]:
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
