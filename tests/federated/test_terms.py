"""A client's own file and its own limit, before anything leaves."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from curvedp.accounting import read_ledger
from curvedp.errors import ConfigurationError, CurvedpError, RoundError
from curvedp.experiments import deployment
from curvedp.experiments.deployment import run_client
from curvedp.experiments.federations import FederationConfig
from curvedp.experiments.flower_app import client_app, client_of
from curvedp.experiments.terms import ClientTerms
from curvedp.federated.in_process import in_process_grid

OWN = FederationConfig(
    sizes=(40.0, 50.0, 60.0), rounds=3, epsilon=4.0, delta=1e-4,
    data_options={"num_classes": 10},
)  # fmt: skip
TOML = (
    "sizes = [40, 50, 60]\nrounds = 3\nepsilon = 4.0\ndelta = 1e-4\n"
    "[data_options]\nnum_classes = 10\n"
)


def node(folder, asked=OWN, **own):
    """What Flower tells a client of its node and of the server's run."""
    rng = np.random.default_rng(0)
    np.savez(folder / "own.npz", x=rng.normal(size=(50, 1, 8, 8)).astype(np.float32),
             y=rng.integers(0, 10, 50))  # fmt: skip
    (folder / "own.toml").write_text(TOML)
    config = {"client": 1, "run-dir": str(folder / "client"),
              "data": str(folder / "own.npz"), **own}  # fmt: skip
    return SimpleNamespace(
        node_config=config, run_config={"federation": json.dumps(asked.to_json())}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4},
        {"epsilon": 5.0},
        {"view": "trusted-aggregate"},
        {"sizes": (40.0, 5.0, 60.0)},
        {"settings": {"clip_norm": 2.0}},
        {"relation": "zero-out"},
        {"seed": 1},
    ],
)
def test_another_federation_than_that_of_the_clients_own_file_is_refused(changes):
    terms = ClientTerms(OWN)
    with pytest.raises(RoundError, match=f"{next(iter(changes))} differ"):
        terms.accept(replace(OWN, **changes))


def test_what_is_the_servers_alone_may_differ():
    asked = replace(OWN, data="elsewhere", least_clients=3, exact_frames=False)
    assert ClientTerms(OWN).accept(asked) == OWN
    assert ClientTerms().accept(asked) == asked


def test_a_limit_counts_all_rounds():
    limit = ClientTerms(max_epsilon=4.0, delta=1e-4)
    assert limit.accept(OWN) == OWN
    with pytest.raises(RoundError, match="limit is 4"):
        limit.accept(replace(OWN, epsilon=4.1))
    with pytest.raises(RoundError, match="limit is 4"):  # at the client's own delta
        ClientTerms(max_epsilon=4.0, delta=1e-6).accept(OWN)


def test_a_limit_is_against_the_server_unless_the_clients_own_file_says_otherwise():
    trusting = replace(OWN, view="trusted-aggregate")
    with pytest.raises(RoundError, match="view each-client"):
        ClientTerms(max_epsilon=4.0, delta=1e-4).accept(trusting)
    assert ClientTerms(trusting, max_epsilon=4.0).accept(trusting) == trusting
    hidden = replace(trusting, unit="client", records_per_round=60, delta=1e-3)
    with pytest.raises(RoundError, match="does not fit the plan"):
        ClientTerms(max_epsilon=4.0, delta=1e-3).accept(hidden)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"max_epsilon": 3.0}, "at a delta"),
        ({"max_epsilon": -1.0, "delta": 1e-4}, "max_epsilon"),
        ({"max_epsilon": 3.0, "delta": 2.0}, "delta"),
        ({"delta": 1e-4}, "belongs to a limit"),
        ({"config": OWN, "max_epsilon": 3.0}, "limit is 3"),
        ({"config": replace(OWN, sizes=())}, "not declared"),
    ],
)
def test_terms_that_mean_nothing_are_refused(terms, words):
    with pytest.raises(ConfigurationError, match=words):
        ClientTerms(**terms)


def test_a_node_takes_part_in_what_its_terms_allow(tmp_path):
    own = {"config": str(tmp_path / "own.toml"), "max-epsilon": 4.0}
    client = client_of(node(tmp_path, **own))
    assert client.shared.plan.epsilon() <= 4.0
    client.close()
    with pytest.raises(RoundError, match="rounds differ"):
        client_of(node(tmp_path, replace(OWN, rounds=4), **own))
    with pytest.raises(RoundError, match="limit is 2"):
        client_of(node(tmp_path, **{"max-epsilon": 2.0, "delta": 1e-4}))


@pytest.mark.parametrize("secure", [False, True])
def test_a_refused_federation_touches_nothing(tmp_path, secure):
    flower = pytest.importorskip("flwr.app")
    told = node(tmp_path, replace(OWN, rounds=4), config=str(tmp_path / "own.toml"))
    context = flower.Context(run_id=1, node_id=1, node_config=told.node_config,
                             state=flower.RecordDict(),
                             run_config=told.run_config)  # fmt: skip
    app = client_app(secure=secure)
    in_process_grid(app, 1)  # Flower makes messages in a run alone
    answer = app(flower.Message(flower.RecordDict(), 1, "train"), context)
    reason = (
        answer.error.reason
        if secure
        else answer.content.config_records["facts"]["refused"]
    )
    assert "rounds differ" in reason
    assert not (tmp_path / "client").exists()


def test_a_client_without_records_in_its_file_takes_part(tmp_path):
    told = node(tmp_path)
    np.savez(tmp_path / "own.npz", x=np.zeros((0, 1, 8, 8), np.float32),
             y=np.zeros(0, np.int64))  # fmt: skip
    client = client_of(told)
    server = OWN.server(client.shared)
    update = client.answer(server.open_round())
    client.close()
    assert server.reason_against(update) is None
    assert read_ledger(tmp_path / "client" / "ledger.jsonl").count() == 1


def test_terms_are_checked_before_a_node_is_started(tmp_path):
    (tmp_path / "own.toml").write_text(TOML)
    with pytest.raises(ConfigurationError, match="limit is 1"):
        run_client(
            1, tmp_path / "client", superlink="127.0.0.1:1", keys=None,
            config=tmp_path / "own.toml", max_epsilon=1.0,
        )  # fmt: skip
    assert not (tmp_path / "client").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"number": 3}, "numbered from 0 to 2"),
        ({"number": -1}, "no client -1"),
        ({"superlink": "nowhere"}, "write host:port"),
        ({"keys": "keys"}, "no ca.crt"),
        ({"data": "records.npz"}, "no such file"),
    ],
)
def test_what_no_server_makes_good_is_refused_before_a_node_is_started(
    tmp_path, monkeypatch, wrong, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deployment, "running", lambda *_: pytest.fail("a node started"))
    (tmp_path / "own.toml").write_text(TOML)
    asked = {"number": 1, "superlink": "127.0.0.1:1", "keys": None, **wrong}
    if asked["keys"]:
        asked["keys"] = tmp_path / asked["keys"]
    with pytest.raises(CurvedpError, match=words):
        run_client(
            asked.pop("number"), tmp_path / "client",
            config=tmp_path / "own.toml", patience=1.0, **asked,
        )  # fmt: skip
    assert not (tmp_path / "client").exists()
