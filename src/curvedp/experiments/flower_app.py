"""The Flower app of a federation: what SuperLink and SuperNodes run.

Its run config holds the federation's config as JSON (``federation``) and the server's
folder (``run-dir``). A node's config says which client it is (``client``), where its
folder is (``run-dir``), where its own records are, if it has any (``data``), and what
it insists on (``config``, ``max-epsilon``, ``delta``).

Flower may run every message in a new process, so a client is made from its folder each
time; the model and its coverage are kept as long as a process lives.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError, LedgerError
from curvedp.experiments.federations import FederationConfig, serve
from curvedp.experiments.terms import ClientTerms
from curvedp.federated import Client, Server, Shared
from curvedp.federated.flower import (
    FlowerAsk,
    client_number,
    make_client_app,
    make_server_app,
)
from curvedp.federated.secagg import carried, make_secure_client_app
from curvedp.storage import read_json, write_atomically, write_json

_LOCK_SECONDS = 120.0

__all__ = ["client_app", "client_of", "server_app", "server_main"]


def client_of(context: Any) -> Client:
    """The client of a node, from its folder and its records."""
    number, node = client_number(context), context.node_config
    if "run-dir" not in node:
        raise ConfigurationError(
            "a client needs a folder that remembers what it has spent",
            "start the SuperNode with --node-config 'client=3 run-dir=\"folder\"'",
        )
    terms = ClientTerms(
        FederationConfig.read(str(node["config"])) if "config" in node else None,
        node.get("max-epsilon"),
        node.get("delta"),
    )
    asked = FederationConfig.from_mapping(
        json.loads(str(context.run_config["federation"]))
    )
    text = json.dumps(terms.accept(asked).to_json())
    config, shared, records = _client_parts(text, str(node.get("data", "")), number)
    return config.client(number, shared, records, Path(str(node["run-dir"])))


@lru_cache(maxsize=1)
def _client_parts(
    text: str, data: str, number: int
) -> tuple[FederationConfig, Shared, Any]:
    config = FederationConfig.from_mapping(json.loads(text))
    named = replace(config, data=data) if data else config
    source = named.source(with_test=False, may_be_empty=bool(data))
    # without records of its own, a client of a demonstration takes its part of the data
    records = source.train if data else config.parts(source.train)[number]
    return config, config.shared(source), records


def server_main(ask: FlowerAsk, context: Any) -> None:
    """Make the rounds that are left; progress and result are files in the folder."""
    settings = context.run_config
    folder = Path(str(settings["run-dir"]))
    config = FederationConfig.from_mapping(json.loads(str(settings["federation"])))
    source = config.source()
    server = _unlocked(lambda: config.server(config.shared(source), folder))
    ask.least = config.least_clients
    if server.grid is not None:
        ask.least = max(ask.least, server.grid.threshold)
    known = folder / "flower" / "nodes.json"
    if known.exists():
        ask.bind({int(node): int(c) for node, c in read_json(known).items()})
    progress = folder / "rounds.jsonl"
    earlier = _rows(progress, server.round)
    progress.write_text("".join(json.dumps(row) + "\n" for row in earlier))

    def report(row: dict[str, float]) -> None:
        with progress.open("a") as file:
            file.write(json.dumps(row) + "\n")

    try:
        result = serve(
            server, carried(ask, server), source.test, tries=20, on_round=report
        )
        result = replace(result, rows=[*earlier, *result.rows])
        write_atomically(
            folder / "result.json", lambda path: write_json(path, result.to_json())
        )
    finally:
        server.close()


def _rows(path: Path, rounds: int) -> list[dict[str, float]]:
    """What earlier starts of this run have told of its first rounds.

    A line that was cut off by a kill, and what is of another run, is left out.
    """
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            found[int(row["round"])] = row
    return [found[number] for number in sorted(found) if number <= rounds]


def _unlocked(make: Callable[[], Server]) -> Server:
    """The server, as soon as a process of a killed one has let go of the folder."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return make()
        except LedgerError as error:
            if "in use" not in error.problem or time.monotonic() > end:
                raise
            time.sleep(1.0)


def client_app(*, secure: bool = False) -> Any:
    """The ClientApp; a secure one lets updates leave under masks alone."""
    return make_secure_client_app(client_of) if secure else make_client_app(client_of)


def server_app(*, timeout: float, wait_for: int) -> Any:
    """The ServerApp."""
    return make_server_app(server_main, timeout=timeout, wait_for=wait_for)
