"""A whole federation on one machine: what ``curvedp federated simulate`` runs.

The apps are those of a deployment. Clients answer one after the other in this process,
or in several at once in the worker processes of Flower's simulation engine, which is
built on Ray: the extra ``simulation``.

In a worker a client is made for every message, as Flower does it, so what it has paid
and released has to outlast the message: it has a folder for the length of the
simulation. Model, coverage and data are made once in each worker.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from curvedp.data import ArrayDataset
from curvedp.errors import ConfigurationError, CurvedpError, missing_extra
from curvedp.experiments.federations import FederationConfig, FederationResult, serve
from curvedp.federated import Client, Shared
from curvedp.federated.flower import (
    FlowerAsk,
    client_number,
    flwr_part,
    make_client_app,
    make_server_app,
)
from curvedp.federated.in_process import in_process_grid
from curvedp.federated.secagg import carried, make_secure_client_app

__all__ = ["simulate"]


def simulate(
    config: FederationConfig,
    *,
    workers: int = 0,
    on_round: Callable[[dict[str, float]], None] | None = None,
) -> FederationResult:
    """Split a dataset between clients and train.

    Args:
        config: of the federation; sizes that it does not declare are those of the
            split.
        workers: processes that clients are spread over, by Flower's simulation engine;
            0 for none but this one.
        on_round: is told of every round.

    Raises:
        ConfigurationError: the federation cannot be, or an extra is missing.
        RoundError: a round found too few usable updates.
    """
    _check(workers)
    source = config.source()
    parts = config.parts(source.train)
    config = config.declared(parts)
    if workers:  # with other threads than here, so maps differ in their last bits
        config = replace(config, exact_frames=False)
    server = config.server(config.shared(source))
    logging.getLogger("flwr").setLevel(logging.WARNING)  # it tells of every message
    found: list[FederationResult] = []

    stop = threading.Event()

    def main(ask: FlowerAsk, context: Any) -> None:
        if workers:
            ask.grid = _Stoppable(ask.grid, stop)
        ways = carried(ask, server)
        found.append(serve(server, ways, source.test, on_round=on_round))

    make_app = make_secure_client_app if config.is_secure else make_client_app
    server_app = make_server_app(main, wait_for=len(parts))
    if workers:
        with tempfile.TemporaryDirectory(prefix="curvedp-") as folder:
            text = json.dumps(config.to_json())
            client_app = make_app(partial(_client_in, folder, text))
            try:
                _run_workers(server_app, client_app, len(parts), workers)
            finally:
                stop.set()
    else:
        together = config.shared(source)
        clients = {i: config.client(i, together, own) for i, own in enumerate(parts)}
        client_app = make_app(lambda context: clients[client_number(context)])
        server_app(in_process_grid(client_app, len(parts)), None)
    if not found:
        raise CurvedpError(
            "Flower's simulation engine ended without a result",
            "its own lines above may say why; --workers 0 does without it",
        )
    return found[0]


def _check(workers: int) -> None:
    if workers < 0:
        raise ConfigurationError(
            f"{workers} workers", "give the number of processes, or 0 for this one"
        )
    flwr_part("app")
    if workers and not _has_ray():
        raise missing_extra("ray", "simulation")  # Flower would end the process


def _has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _run_workers(server_app: Any, client_app: Any, clients: int, workers: int) -> None:
    """Run both apps by Flower's engine: the server here, the clients in workers."""
    _refuse_telemetry()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns
    # a call of Flower's Python interface is logged as deprecated, and its command is
    # not for us: it installs what an app depends on and leaves a daemon behind
    logging.getLogger("flwr").setLevel(logging.ERROR)
    flwr_part("simulation").run_simulation(
        server_app,
        client_app,
        clients,
        backend_config={
            "init_args": {
                "num_cpus": min(workers, clients),
                "logging_level": logging.ERROR,
            },
            # one each, and so one thread each: torch's would fight for the cores
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


def _refuse_telemetry() -> None:
    """Flower tells its makers of every simulation, unless the user has decided.

    It reads the variable when it is imported, which has happened by now.
    """
    if os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0") == "0":
        flwr_part("supercore.telemetry").FLWR_TELEMETRY_ENABLED = "0"


class _Stoppable:
    """A grid whose waiting ends when the simulation does.

    Flower runs the server in a thread that outlives an interrupt, and waits there for
    answers that nobody will give.
    """

    def __init__(self, grid: Any, stop: threading.Event) -> None:
        self._grid, self._stop = grid, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> list[Any]:
        """As Flower's own, but for the end."""
        waiting = set(self._grid.push_messages(messages))
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        found: list[Any] = []
        while waiting and time.monotonic() < end:
            if self._stop.is_set():
                raise CurvedpError("the simulation was stopped")
            replies = list(self._grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            found += replies
            if waiting:
                time.sleep(0.05)
        return found


# -- in a worker -----------------------------------------------------------------------


def _client_in(folder: str, text: str, context: Any) -> Client:
    """The client of a node, from its folder."""
    config, shared, parts = _common(text)
    number = client_number(context)
    own = Path(folder) / f"client-{number}"
    return config.client(number, shared, parts[number], own)


@lru_cache(maxsize=1)
def _common(text: str) -> tuple[FederationConfig, Shared, list[ArrayDataset]]:
    config = FederationConfig.from_mapping(json.loads(text))
    source = config.source(with_test=False)
    return config, config.shared(source), config.parts(source.train)
