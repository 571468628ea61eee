"""A model that a run folder names is imported only if the user says its name too."""

import json
import sys
from dataclasses import replace

import pytest

from curvedp.errors import ConfigurationError, RoundError
from curvedp.experiments import (
    CompareConfig,
    StopRequest,
    compare,
    load_trained,
    resume_comparison,
    resume_run,
    resume_sweep,
    sweep,
    train_run,
)
from curvedp.experiments.federations import FederationConfig
from curvedp.experiments.terms import ClientTerms
from tests.experiments.sweeping import make

NAME = "a_module_of_consent:made"


@pytest.fixture
def own(tmp_path, monkeypatch):
    text = "from torch import nn\ndef made(): return nn.Linear(6, 3)\n"
    (tmp_path / "a_module_of_consent.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forgotten()


def forgotten():
    sys.modules.pop("a_module_of_consent", None)


def stopping(after):
    stop = StopRequest()
    steps = []

    def report(*_):
        steps.append(1)
        if len(steps) == after:
            stop()

    return {"on_progress": report, "stop": stop}


def refused(call):
    forgotten()
    with pytest.raises(ConfigurationError, match="a_module_of_consent"):
        call()
    assert "a_module_of_consent" not in sys.modules


def test_a_run(config, own):
    folder = own / "run"
    train_run(replace(config, model=NAME), folder, **stopping(3))
    refused(lambda: resume_run(folder))
    refused(lambda: load_trained(folder))
    refused(lambda: resume_run(folder, model="a_module_of_consent:other"))
    assert resume_run(folder, model=NAME).finished
    assert load_trained(folder, model=NAME).step == 12
    forgotten()
    assert resume_run(folder).finished, "nothing is left to be imported"


def test_a_comparison(config, own):
    folder = own / "comparison"
    both = CompareConfig(replace(config, model=NAME), ("dp-sgd", "dp-adam"), 1)
    assert compare(both, folder, **stopping(15)) is None
    refused(lambda: resume_comparison(folder))
    assert resume_comparison(folder, model=NAME) is not None


def test_a_sweep_and_whoever_helps(base, own):
    folder = own / "sweep"
    config = make(replace(base, model=NAME), trials=2)
    assert sweep(config, folder, **stopping(3)) is None
    refused(lambda: resume_sweep(folder))
    assert sweep(config, folder) is not None, "said again, in the config"
    forgotten()
    assert resume_sweep(folder, model=NAME).work() is not None


def test_a_server_cannot_name_it():
    asked = FederationConfig(
        data="digits", model=NAME, clients=2, sizes=(9.0, 9.0), delta=1e-3
    )
    with pytest.raises(RoundError, match="--config"):
        ClientTerms().accept(asked)
    assert ClientTerms(asked).accept(asked) == asked, "from a file of its own"


@pytest.mark.parametrize("hidden", [False, True])
def test_seconds_are_kept_only_where_the_size_is_public(config, tmp_path, hidden):
    rate = {"sample_rate": 0.5, "steps": 3, "expected_batch_size": 30}
    if hidden:
        privacy = {"noise_multiplier": 2.0, "delta": 1e-3, **rate}
        config = replace(config, privacy=privacy)
    folder = tmp_path / "run"
    seconds = train_run(config, folder).seconds
    stored = json.loads((folder / "result.json").read_text())["seconds"]
    assert (seconds is None, stored is None) == (hidden, hidden)
    assert resume_run(folder).seconds == stored
