"""Spectra from the cache: the same, of the same matrix only, and nothing else read."""

import json
import logging
import multiprocessing
import os
import time

import pytest
import torch

from curvedp.barrier import Provenance
from curvedp.curvature import curvature_spectrum, fingerprint, remembered
from curvedp.storage import cache_folder

SIZE = 300


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("curvedp.curvature.kept_spectra.WORTH_KEEPING", 0.0)


def matrix(seed=0):
    random = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(
        torch.randn(SIZE, SIZE, dtype=torch.float64, generator=random)
    )
    return q @ torch.diag(torch.linspace(0.1, 3, SIZE, dtype=torch.float64) ** 3) @ q.mT


class Search:
    """Counts how often a spectrum is really looked for."""

    def __init__(self, of, provenance=Provenance.SYNTHETIC):
        self.product = lambda v: of @ v
        self.provenance = provenance
        self.found = 0

    def find(self):
        self.found += 1
        return curvature_spectrum(self.product, SIZE, self.provenance, top=20)

    def __call__(self, name="spectrum"):
        return remembered(self.find, self.product, SIZE, self.provenance, name)


def file(name="spectrum"):
    return cache_folder("spectra") / f"{name}.json"


def test_the_second_search_finds_what_the_first_left():
    search = Search(matrix())
    first, second = search(), search()
    assert search.found == 1
    assert second == first and first.tail is not None
    assert not file().with_suffix(".lock").exists()


def test_what_is_found_at_once_is_not_kept(monkeypatch):
    monkeypatch.setattr("curvedp.curvature.kept_spectra.WORTH_KEEPING", 1e9)
    Search(matrix())()
    assert not file().exists()


def test_what_is_not_public_is_neither_kept_nor_taken():
    Search(matrix())()
    search = Search(matrix(), Provenance.ORACLE)
    assert search("spectrum").provenance is Provenance.ORACLE
    assert search("other").provenance is Provenance.ORACLE
    assert search.found == 2 and not file("other").exists()


def test_the_provenance_is_that_of_the_run_at_hand():
    Search(matrix())()
    assert Search(matrix(), Provenance.PUBLIC)().provenance is Provenance.PUBLIC


@pytest.mark.parametrize("change", ["other", "scaled", "one entry"])
def test_a_name_does_not_stand_for_another_matrix(change, caplog):
    Search(matrix())()
    other = {"other": matrix(1), "scaled": 1.001 * matrix(), "one entry": matrix()}
    if change == "one entry":
        other[change][3, 3] += 0.05
    search = Search(other[change])
    with caplog.at_level(logging.WARNING):
        found = search()
    assert search.found == 1 and "another one" in caplog.text
    assert found == Search(other[change]).find()
    assert search() == found and search.found == 1  # and is kept in its place


def test_rounding_is_no_other_matrix():
    Search(matrix())()
    search = Search(matrix() * (1 + 1e-9))
    search()
    assert search.found == 0


GOOD = {"count": 280, "least": 1e-3, "slope": 1.0, "power": 0.5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"largest": []},
        {"largest": [1.0, 2.0]},
        {"largest": [-1.0]},
        {"largest": [1.0] * (SIZE + 1)},
        {"largest": "much"},
        {"largest": "321"},
        {"largest": [10**400]},
        {"largest": None},
        {"tail": {**GOOD, "count": 10**12}},
        {"tail": {**GOOD, "count": 2.5}},
        {"tail": {**GOOD, "slope": -1.0}},
        {"tail": {**GOOD, "slope": 1e308}},
        {"tail": {**GOOD, "least": 0.0}},
        {"tail": {**GOOD, "power": "2"}},
        {"tail": {"count": 3}},
        {"seen": [1.0]},
        {"seen": "same"},
        {"seen": [10**400, 1.0]},
    ],
)
def test_a_file_that_says_something_impossible_is_found_again(wrong):
    search = Search(matrix())
    first = search()
    stored = json.loads(file().read_text())
    file().write_text(json.dumps({**stored, **wrong}))
    assert search() == first and search.found == 2
    assert search() == first and search.found == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"1" * 10**6])
def test_a_file_that_is_no_spectrum_is_found_again(content):
    search = Search(matrix())
    first = search()
    file().write_bytes(content)
    assert search() == first and search.found == 2


def test_a_cache_that_cannot_be_written_is_not_needed(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    search = Search(matrix())
    assert search() == search() and search.found == 2


def test_a_cache_that_cannot_be_looked_at_is_not_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 100)))
    search = Search(matrix())
    assert search() == search() and search.found == 2


def _slowly(folder, log):
    os.environ["XDG_CACHE_HOME"] = folder
    torch.set_num_threads(1)
    search = Search(matrix())
    find = search.find

    def slow():
        with open(log, "a") as file:
            file.write("found\n")
        time.sleep(0.5)
        return find()

    module = __import__("curvedp.curvature.kept_spectra", fromlist=["x"])
    module.WORTH_KEEPING = 0.0
    remembered(slow, search.product, SIZE, search.provenance, "spectrum")


def test_processes_that_want_the_same_one_wait_for_the_first(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path), str(log))
    processes = [context.Process(target=_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert log.read_text() == "found\n"


def test_a_fingerprint_is_of_every_bit():
    x = torch.ones(3)
    same = fingerprint({"a": 1}, [x])
    assert same == fingerprint({"a": 1}, [x.clone()])
    others = [
        fingerprint({"a": 2}, [x]),
        fingerprint({"a": 1}, [x + 1e-7]),
        fingerprint({"a": 1}, [x.double()]),
        fingerprint({"a": 1}, [x.reshape(1, 3)]),
        fingerprint({"a": 1}, [x, x]),
    ]
    assert len({same, *others}) == 6
