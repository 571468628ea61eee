"""What surrounds the processes of a deployment, without the processes."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest

from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.experiments import deployment
from curvedp.experiments.certificates import make_keys, refuse_unnamed
from curvedp.experiments.federations import FederationConfig
from curvedp.experiments.flower_app import server_main
from curvedp.federated.flower import FlowerAsk, client_number, make_client_app
from curvedp.federated.in_process import in_process_grid
from curvedp.federated.rounds import run_rounds

from .worlds import World

CONFIG = FederationConfig(sizes=(700.0, 700.0), rounds=2, epsilon=8.0, delta=1e-4)


@pytest.fixture
def superlink(monkeypatch, tmp_path):
    """Flower's commands as calls that are remembered, with an answer for each."""
    calls = []

    def flwr(environment, *arguments, check=True):
        calls.append(arguments)
        return answers.get(arguments[0], lambda *_: "{}")(*arguments)

    @contextlib.contextmanager
    def running(command, environment, log):
        calls.append(tuple(command))
        yield SimpleNamespace(poll=lambda: None)

    answers = {}
    for name, stand_in in {
        "flwr": flwr, "running": running, "tool": lambda name: name,
        "wait_for_port": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(deployment, name, stand_in)
    return SimpleNamespace(calls=calls, answers=answers)


def started(folder, **options):
    options = {"address": "127.0.0.1:9871", "keys": None, **options}
    return deployment.run_server(CONFIG, folder, **options)


def test_a_result_of_an_earlier_start_is_not_that_of_this_one(superlink, tmp_path):
    (tmp_path / "result.json").write_text('{"of": "an earlier start"}')

    def run(*_):
        (tmp_path / "result.json").write_text('{"of": "this start"}')
        return "{}"

    superlink.answers["run"] = run
    assert started(tmp_path) == {"of": "this start"}


def test_a_start_that_ends_without_a_result_has_none(superlink, tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text('{"of": "an earlier start"}')
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    ended = {"runs": [{"status": "finished:failed"}]}
    superlink.answers["list"] = lambda *_: json.dumps(ended)
    with pytest.raises(CurvedpError, match="without a result"):
        started(tmp_path)


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("0.0.0.0:9871", "127.0.0.1:9871"),
        ("localhost:9871", "localhost:9871"),
        ("127.0.0.2:9871", "127.0.0.2:9871"),
    ],
)
def test_the_server_is_reached_where_it_listens(superlink, tmp_path, address, reached):
    def run(*_):
        (tmp_path / "result.json").write_text("{}")
        return "{}"

    if address.startswith("127.0.0.2") and sys.platform != "linux":
        pytest.skip("a second loopback address is Linux's")
    superlink.answers["run"] = run
    started(tmp_path, address=address)
    settings = (tmp_path / "flower" / "config.toml").read_text()
    assert f'address = "{reached}"' in settings
    command = superlink.calls[0]
    assert command[command.index("--host") + 1] == address.rpartition(":")[0]


def test_a_certificate_must_name_where_the_server_is_reached(superlink, tmp_path):
    pytest.importorskip("cryptography")
    make_keys(tmp_path / "keys", 1, ["server.example.org", "127.0.0.1"])
    refuse_unnamed(tmp_path / "keys", "127.0.0.1")
    with pytest.raises(ConfigurationError, match="does not name localhost"):
        started(tmp_path / "s", address="localhost:9871", keys=tmp_path / "keys")
    with pytest.raises(ConfigurationError, match="no certificate"):
        refuse_unnamed(tmp_path, "localhost")


# -- which node is which client --------------------------------------------------------


def test_the_node_of_a_key_is_remembered_and_found_again(superlink, tmp_path):
    pytest.importorskip("cryptography")
    make_keys(tmp_path / "keys", 2, ["127.0.0.1"])
    nodes = iter([71, 72])

    def register(*arguments):
        node = next(nodes, None)  # later: Flower says "already" and no number
        return "{}" if node is None else json.dumps({"node-id": node})

    def run(*_):
        (tmp_path / "s" / "result.json").write_text("{}")
        return "{}"

    superlink.answers |= {"supernode": register, "run": run}
    for _ in range(2):
        started(tmp_path / "s", keys=tmp_path / "keys")
        known = json.loads((tmp_path / "s/flower/nodes.json").read_text())
        assert known == {"71": 0, "72": 1}
    (tmp_path / "s/flower/nodes.json").unlink()
    with pytest.raises(CurvedpError, match="which node it is"):
        started(tmp_path / "s", keys=tmp_path / "keys")
    (tmp_path / "keys" / "client-1.pub").unlink()
    with pytest.raises(ConfigurationError, match=r"no client-1\.pub"):
        started(tmp_path / "s", keys=tmp_path / "keys")


def test_a_client_with_a_key_cannot_take_the_number_of_another():
    pytest.importorskip("flwr.app")
    world = World(rounds=1)
    app = make_client_app(lambda context: world.client(client_number(context)))

    def lying(message, context):
        if context.node_id == 2:  # that of the key of client 1
            context.node_config["client"] = 0
        return app(message, context)

    told = []
    ask = FlowerAsk(in_process_grid(lying, 3), patience=0.1,
                    on_refusal=lambda *what: told.append(what))  # fmt: skip
    ask.bind({1: 0, 2: 1, 3: 2})
    made = []
    run_rounds(world.server, ask, on_round=made.append)
    assert told == [(1, "it says that it is client 0")]
    assert made[0].accepted == (0, 2)


def test_a_node_whose_key_is_not_known_is_not_asked():
    pytest.importorskip("flwr.app")
    world = World(rounds=1)
    app = make_client_app(lambda context: world.clients[client_number(context)])
    ask = FlowerAsk(in_process_grid(app, 3), patience=0.1)
    ask.bind({1: 0, 3: 2})
    assert ask.nodes() == {1: 0, 3: 2}


# -- whom a round waits for ------------------------------------------------------------


def test_all_are_waited_for_at_the_start_and_the_least_later():
    grid = SimpleNamespace(get_node_ids=lambda: [1, 2])
    looked = []

    class Waiting(FlowerAsk):
        def _introduce(self, nodes):
            looked.append(len(nodes))
            if len(looked) == 2:
                self._numbers.update({1: 0, 2: 1})

    ask = Waiting(grid, wait_for=2, patience=5)
    assert ask.nodes() == {1: 0, 2: 1}
    assert len(looked) == 2  # it has waited
    grid.get_node_ids = lambda: [2]
    assert ask.nodes() == {2: 1}
    assert len(looked) == 3  # at once
    ask.least, ask._patience = 2, 0.6
    ask.nodes()
    assert len(looked) > 4


def test_a_server_takes_up_the_rows_of_its_own_run_alone(tmp_path, monkeypatch):
    """Another run's rows, and a line that a kill has cut off, are no result."""
    pytest.importorskip("flwr.app")
    source = CONFIG.source()
    shared, parts = CONFIG.shared(source), CONFIG.parts(source.train)
    clients = {i: CONFIG.client(i, shared, part) for i, part in enumerate(parts)}
    app = make_client_app(lambda context: clients[client_number(context)])
    context = SimpleNamespace(
        run_config={
            "run-dir": str(tmp_path),
            "federation": json.dumps(CONFIG.to_json()),
        }
    )
    (tmp_path / "rounds.jsonl").write_text('{"round": 7.0}\n{"round": 1.0, "accu')
    ask = FlowerAsk(in_process_grid(app, 2))
    server_main(ask, context)
    assert ask.least == CONFIG.least_clients
    for _ in range(2):
        found = json.loads((tmp_path / "result.json").read_text())
        assert [row["round"] for row in found["rounds"]] == [1.0, 2.0]
        server_main(ask, context)  # a run that is over tells the same again
