"""Federations on one machine, in this process and in those of Flower's engine."""

import importlib.util
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from curvedp.errors import ConfigurationError, CurvedpError, RoundError
from curvedp.experiments import simulation
from curvedp.experiments.federations import FederationConfig
from curvedp.experiments.simulation import simulate
from curvedp.federated.in_process import in_process_grid
from curvedp.noise import RandomStreams

pytest.importorskip("flwr.app")

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A small federation on a file that is named relative to the folder."""
    rng = np.random.default_rng(0)
    y = np.arange(400) % 3
    centres = 2 * rng.standard_normal((3, 6))
    x = (centres[y] + rng.standard_normal((400, 6))).astype(np.float32)
    np.savez(
        tmp_path / "own.npz",
        x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:],
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)

    def make(**more):
        return FederationConfig(
            data="own.npz", data_options={"num_classes": 3}, clients=4, rounds=3,
            noise_multiplier=0.01, delta=1e-4, **more,
        )  # fmt: skip

    return make


@pytest.fixture
def engine(monkeypatch):
    """Flower's engine without Ray: keeps no client from one message to the next."""
    called = []

    def run_simulation(server_app, client_app, clients, backend_config):
        called.append((clients, json.loads(json.dumps(backend_config))))
        server_app(in_process_grid(client_app, clients), None)

    real = simulation.flwr_part
    monkeypatch.setattr(
        simulation,
        "flwr_part",
        lambda part: (
            SimpleNamespace(run_simulation=run_simulation)
            if part == "simulation"
            else real(part)
        ),
    )
    monkeypatch.setattr(simulation, "_has_ray", lambda: True)
    return called


def accuracies(result):
    return [row["accuracy"] for row in result.rows]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"view": "secure-aggregate", "dropouts": 1},
        {"recipe": "dp-fedkfc", "settings": {"probe_size": 32, "refresh": 2}},
    ],
)
def test_workers_train_what_one_process_does(config, engine, more):
    told = []
    alone = simulate(config(**more))
    spread = simulate(config(**more), workers=2, on_round=told.append)
    assert engine == [
        (4, {
            "init_args": {"num_cpus": 2, "logging_level": 40},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        })
    ]  # fmt: skip
    assert told == spread.rows
    assert [row["clients"] for row in spread.rows] == [4, 4, 4]
    assert accuracies(spread) == pytest.approx(accuracies(alone), abs=0.03)
    assert spread.epsilon == alone.epsilon


def test_what_clients_remember_ends_with_the_simulation(config, engine, monkeypatch):
    """Their folders hold ledgers of simulated clients, which nobody is to find."""
    folders = []
    real = simulation._client_in

    def client_in(folder, text, context):
        folders.append(simulation.Path(folder))
        client = real(folder, text, context)
        number = simulation.client_number(context)
        assert (folders[-1] / f"client-{number}" / "ledger.jsonl").exists()
        return client

    monkeypatch.setattr(simulation, "_client_in", client_in)
    simulate(config(), workers=1)
    assert len(folders) >= 12
    assert not any(folder.exists() for folder in folders)


def test_a_round_that_fails_is_told_as_in_one_process(config, engine, monkeypatch):
    def broken(folder, text, context):
        raise RoundError("nobody is here")

    monkeypatch.setattr(simulation, "_client_in", broken)
    with pytest.raises(RoundError, match="0 usable updates"):
        simulate(config(), workers=1)


def test_an_engine_that_ends_without_a_result_is_told(config, engine, monkeypatch):
    monkeypatch.setattr(simulation, "_run_workers", lambda *_: None)
    with pytest.raises(CurvedpError, match="without a result"):
        simulate(config(), workers=1)


def test_a_server_that_waits_ends_with_the_simulation(config, engine, monkeypatch):
    """Flower's thread would wait on after an interrupt, for answers of nobody."""
    threads = []

    def interrupted(server_app, client_app, clients, workers):
        grid = in_process_grid(client_app, clients)
        grid.pull_messages = lambda ids: []  # the workers are gone
        thread = threading.Thread(target=failing, args=(server_app, grid))
        thread.start()
        threads.append(thread)
        raise KeyboardInterrupt

    def failing(server_app, grid):
        with pytest.raises(CurvedpError, match="stopped"):
            server_app(grid, None)
        told.append("stopped")

    told = []
    monkeypatch.setattr(simulation, "_run_workers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(config(), workers=2)
    threads[0].join(10)
    assert told == ["stopped"]


def test_no_more_workers_than_clients_and_flower_tells_nobody(
    config, engine, monkeypatch
):
    from flwr.supercore import telemetry

    monkeypatch.setattr(telemetry, "FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED", raising=False)
    simulate(config(), workers=9)
    assert engine[0][1]["init_args"]["num_cpus"] == 4
    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    monkeypatch.setattr(telemetry, "FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")  # the user's own wish
    simulate(config(), workers=1)
    assert telemetry.FLWR_TELEMETRY_ENABLED == "1"


def test_workers_may_round_a_map_differently(config, engine, monkeypatch):
    """They have other numbers of threads, and so other orders of adding up."""
    real = simulation._common

    def other_bits(text):
        made, shared, parts = real(text)
        shared.whiteners._streams = RandomStreams(99)  # maps of their own
        return made, shared, parts

    monkeypatch.setattr(simulation, "_common", other_bits)
    more = {"recipe": "dp-fedkfc", "settings": {"probe_size": 32, "refresh": 2}}
    found = simulate(config(**more), workers=2)
    assert [row["clients"] for row in found.rows] == [4, 4, 4]


def test_less_than_no_workers_are_refused(config):
    with pytest.raises(ConfigurationError, match="-1 workers"):
        simulate(config(), workers=-1)


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_the_extra_is_named_where_ray_is_missing(config):
    """Flower itself would end the process."""
    with pytest.raises(ConfigurationError, match="'ray'") as caught:
        simulate(config(), workers=2)
    assert "curvedp[simulation]" in caught.value.advice


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="needs the extra simulation")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"view": "secure-aggregate", "dropouts": 1},
        {"recipe": "dp-fedkfc", "settings": {"probe_size": 32, "refresh": 2}},
    ],
    ids=["each", "secure", "kfc"],
)
@pytest.mark.filterwarnings("ignore")
def test_flowers_engine_trains_what_one_process_does(config, more):
    alone = simulate(config(**more))
    spread = simulate(config(**more), workers=2)
    assert [row["clients"] for row in spread.rows] == [4, 4, 4]
    assert accuracies(spread) == pytest.approx(accuracies(alone), abs=0.03)
