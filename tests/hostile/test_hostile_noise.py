"""Designs in the cache, spectra, and the secret of a run that somebody else wrote."""

import io
import json
import logging
import os
import pickle
import zipfile

import numpy as np
import pytest

from curvedp.accounting import PoissonGaussianEvent
from curvedp.errors import CheckpointError, ConfigurationError, LedgerError
from curvedp.noise.design import Design, _strategy, designs_folder
from curvedp.noise.strategies import PrefixSums
from curvedp.plan import Correlation, SamplingPlan
from curvedp.plan.correlation import best_bands
from curvedp.train.journal import restore_group_settings
from tests.crash.test_more_faults import in_a_fork
from tests.hostile.test_hostile_arrays import Trap
from tests.train.test_correlated_runs import RUN, STEPS, advance, attach

pytestmark = pytest.mark.hostile

DESIGNS = {
    kind: Design.of(kind, 12, 3, PrefixSums()) for kind in ("banded", "toeplitz", "blt")
}


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """A good design may be cached, also where a question about it is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    _strategy.cache_clear()
    yield designs_folder()
    _strategy.cache_clear()


def packed(arrays, packing=zipfile.ZIP_STORED):
    """An archive of named bytes, as numpy's."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", packing) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


def npy(array, **pickling):
    stream = io.BytesIO()
    np.save(stream, array, **pickling)
    return stream.getvalue()


def claiming(shape, dtype="<f8"):
    """An array's header, and nothing after it."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return stream.getvalue()


ONES = npy(np.ones((3, 12)))
DAMAGED = {
    "nothing": b"",
    "no archive": b"PK but no more",
    "an array alone": ONES,
    "half of it": packed({"columns": ONES})[:90],
    "another array": packed({"rows": ONES}),
    "a huge claim": packed({"columns": claiming((3, 10**12))}),
    "a negative claim": packed({"columns": claiming((-3, 12))}),
    "a bomb": packed({"columns": bytes(10**8)}, zipfile.ZIP_DEFLATED),
    "a bomb beside": packed(
        {"columns": ONES, "z": npy(np.zeros(10**6))}, zipfile.ZIP_DEFLATED
    ),
    "more bands": packed({"columns": npy(np.zeros((12, 12)) + np.eye(12)[0])}),
    "more steps": packed({"columns": npy(np.ones((3, 1000)))}),
    "one dimension": packed({"columns": npy(np.ones(36))}),
    "text": packed({"columns": npy(np.full((3, 12), "x"))}),
    "complex": packed({"columns": npy(np.ones((3, 12), complex))}),
    "NaN": packed({"columns": npy(np.full((3, 12), np.nan))}),
    "columns too long": packed({"columns": npy(np.ones((3, 12)))}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_foreign_file_in_the_cache_is_found_anew(cache, caplog, case):
    design = DESIGNS["banded"]
    path = design.path(cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(DAMAGED[case])
    with caplog.at_level(logging.WARNING):
        found = design.strategy()
    assert found.digest() == design.find().digest()
    assert "is not used" in caplog.text and len(caplog.text) < 1000
    _strategy.cache_clear()
    assert design.strategy().digest() == found.digest()  # the file was replaced
    assert "is not used" not in caplog.text.partition("is not used")[2]


@pytest.mark.parametrize("kind", DESIGNS)
def test_good_files_are_read_and_others_are_no_larger_than_the_design(cache, kind):
    design = DESIGNS[kind]
    found = design.strategy()
    _strategy.cache_clear()
    assert design.strategy().digest() == found.digest()
    many = npy(np.full(10**6, 1e-4))
    names = [n for n in found.arrays() if n != "length"]
    design.path(cache).write_bytes(packed(dict.fromkeys(names, many)))
    _strategy.cache_clear()
    assert design.strategy().digest() == found.digest()


def test_a_pickle_in_the_cache_is_not_opened(cache, trap):
    design = DESIGNS["banded"]
    design.path(cache).parent.mkdir(parents=True)
    trapped = np.array([Trap(trap)], dtype=object)
    for content in (
        pickle.dumps(Trap(trap)),
        packed({"columns": npy(trapped, allow_pickle=True)}),
    ):
        design.path(cache).write_bytes(content)
        _strategy.cache_clear()
        assert design.strategy().bands == 3


def test_a_pipe_in_the_cache_is_not_waited_for(cache):
    design = DESIGNS["toeplitz"]
    design.path(cache).parent.mkdir(parents=True)
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), os.mkdir):
        make(design.path(cache))
        _strategy.cache_clear()
        assert design.strategy().bands == 3
        if design.path(cache).is_dir():
            break
        design.path(cache).unlink()


ASKED = ["noise", "design", "--steps", 10, "--bands", 2, "--strategy", "toeplitz"]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"x", b"1\nnan\n", b"1 inf", b"-1", b"1" * 10**5 + b"x", b"\0",
     b"1e308\n1e308"],
    ids=range(9),
)  # fmt: skip
def test_spectra(refused, cache, tmp_path, content):
    (tmp_path / "spectrum").write_bytes(content)
    refused(*ASKED, "--eigenvalues", "spectrum", "--learning-rate", "0.1")


def test_spectra_that_never_end(refused, cache, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(2**40)
    for name in ("pipe", "/dev/zero", "holes", ".", "none"):
        message = refused(*ASKED, "--eigenvalues", name, "--learning-rate", "0.1")
        assert f"{name} is not a list" in message


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1", "1e308"])
def test_learning_rates_of_a_spectrum(refused, cache, tmp_path, rate):
    (tmp_path / "spectrum").write_text("1 0.5")
    refused(*ASKED, "--eigenvalues", "spectrum", "--learning-rate", rate)


@pytest.mark.parametrize(
    "asked",
    [
        ["--steps", 10, "--bands", "9" * 5000],
        ["--steps", 10**30, "--bands", 2],
        ["--steps", 10**9, "--bands", 1],
        ["--steps", 20_000, "--bands", 1],
        ["--steps", 10**6, "--bands", 1000, "--strategy", "toeplitz"],
        ["--steps", 2**31, "--sample-rate", "1e-6", "--epsilon", 1],
        ["--steps", 10**6, "--bands", 4, "--strategy", "blt"],
        ["--steps", 100, "--bands", 200, "--strategy", "blt"],
        ["--steps", 0, "--bands", 2, "--strategy", "blt"],
        [*ASKED[2:], "--parameters", -1],
        [*ASKED[2:], "--sigma", "1e308", "--sample-rate", 0.1],
    ],
    ids=range(11),
)
def test_designs_of_absurd_sizes(refused, cache, asked):
    refused("noise", "design", *asked)


def test_a_run_of_absurd_length_is_not_designed_for():
    sampling = SamplingPlan.by_rate(1e-6, 2**31, 1.0)
    with pytest.raises(ConfigurationError, match="more than can be designed"):
        best_bands(Correlation(), sampling, lambda rate, draws: 1.0)
    with pytest.raises(ConfigurationError, match="more than can be designed"):
        attach(steps=2**31, bands=1)


# -- runs ------------------------------------------------------------------------------


def sitting(**other):
    return {"entropy": "0" * 64, "payments": 0, "joined": False, **other}


SECRETS = {
    "a list": [],
    "a number": 3,
    "no kind": {},
    "no sittings": {"sittings": 3},
    "no run": {"run_id": ...},
    "a text": {"sittings": "sittings"},
    "entropy below zero": {"sittings": [sitting(entropy="-1")]},
    "too much entropy": {"sittings": [sitting(entropy="f" * 500)]},
    "too little entropy": {"sittings": [sitting(entropy="1")]},
    "a number as entropy": {"sittings": [sitting(entropy=3)]},
    "payments below zero": {"sittings": [sitting(payments=-1)]},
    "no payments": {"sittings": [sitting(payments=None)]},
    "half a payment": {"sittings": [sitting(payments=1.5)]},
    "perhaps joined": {"sittings": [sitting(joined="no")]},
}


@pytest.fixture
def stopped(tmp_path):
    with attach(tmp_path / "run") as private:
        advance(private, 3)
        private.save()
    return tmp_path / "run"


@pytest.mark.parametrize("case", SECRETS)
def test_secrets(stopped, case):
    path = stopped / "secret.json"
    content = json.loads(path.read_text())
    entropy = content["sittings"][0]["entropy"]
    changed = SECRETS[case]
    if isinstance(changed, dict):
        changed = {k: v for k, v in (content | changed).items() if v is not ...}
        changed = changed if SECRETS[case] else {"sittings": content["sittings"]}
    path.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"secret\.json cannot be used") as error:
        attach(stopped)
    assert error.value.advice and entropy not in str(error.value)


def test_secrets_that_never_end(stopped):
    path = stopped / "secret.json"
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), os.mkdir):
        path.unlink()
        make(path)
        with pytest.raises(CheckpointError, match=r"secret\.json cannot be used"):
            attach(stopped)


@pytest.mark.parametrize("start", [None, "x", 1.5, -1, True, [], 10**30])
def test_where_a_stored_block_begins(start):
    private = attach()
    advance(private, 2)
    state = private.state_dict()
    state["noise"]["start"] = start
    if start == 10**30:  # not paid for, so a block of its own begins
        private.load_state_dict(state)
        assert private._engine.noise.stored() == {}
        return
    with pytest.raises(CheckpointError, match="does not fit"):
        private.load_state_dict(state)


@pytest.mark.parametrize("noise", [3, "x", [1]])
def test_a_stored_noise_that_is_none(noise):
    private = attach()
    advance(private, 2)
    state = private.state_dict() | {"noise": noise}
    with pytest.raises(CheckpointError, match="does not fit"):
        private.load_state_dict(state)


def test_payments_of_another_kind(stopped):
    with attach(stopped) as private:
        private._engine.ledger.pay(3, 0, PoissonGaussianEvent(1.0, 0.1))
        with pytest.raises(LedgerError, match="another kind"):
            private.steps_left()


@pytest.mark.parametrize(
    "event",
    [
        {"groups": 0}, {"groups": None}, {"groups": 1.5}, {"group": 4}, {"group": -1},
        {"assignment": 3}, {"sample_rate": 2}, {"noise_multiplier": -1},
    ],
    ids=str,
)  # fmt: skip
def test_cyclic_events_of_a_ledger(refused, stopped, event):
    from tests.hostile.test_hostile_runs import forged

    path = forged(stopped, lambda lines: lines[2]["event"].update(event))
    assert "ledger.jsonl, line 3" in refused("privacy", "spent", path)


@pytest.mark.parametrize(
    "facts", [{"rounds": 10**30}, {"rounds": "x"}, {"group_rate": 7}], ids=str
)
def test_plans_of_a_ledger(refused, stopped, facts):
    from tests.hostile.test_hostile_runs import forged

    forged(stopped, lambda lines: lines[0]["facts"].update(facts))
    path = stopped.parent / "alone.jsonl"
    (stopped / "ledger.jsonl").rename(path)
    assert "plans what is impossible" in refused("privacy", "spent", path)


@pytest.mark.parametrize("settings", [[], 3, [3], [{}, {}], [{"params": []}]], ids=str)
def test_settings_of_another_optimiser(settings):
    optimizer = attach()._engine.optimizer
    before = optimizer.param_groups[0]["params"]
    with pytest.raises(CheckpointError, match="another optimiser"):
        restore_group_settings(optimizer, settings)
    assert optimizer.param_groups[0]["params"] is before


@pytest.mark.fault
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("keep", ["buffer", "regenerate"])
def test_a_fork_draws_no_correlated_noise(tmp_path, keep):
    with attach(tmp_path / "run", noise_memory=keep) as private:
        advance(private, 2)
        streams, ledger = private._engine.streams, private._engine.ledger
        weights = list(private._engine.parameters.values())
        for draws in (
            lambda: advance(private, 1),
            lambda: streams.standard_normals(weights, 2, 0),
            lambda: streams.standard_normals(weights, 1, 0, again=True),
            streams.reveal_secret,
        ):
            said = in_a_fork(draws)
            assert "forked" in said and "Error: " in said
        assert ledger.count() == 2
        advance(private, STEPS)  # the parent goes on
        assert private.step == RUN["steps"]
