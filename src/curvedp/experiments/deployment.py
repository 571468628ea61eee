"""Real processes: a Flower SuperLink here, SuperNodes there, over TLS with known keys.

The server's machine runs ``flower-superlink`` and the app of the federation; every
client's machine runs ``flower-supernode``, which connects to it. Certificates make sure
that clients talk to the server, and keys that it talks to clients it knows: Flower
refuses a node whose public key was not registered.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError, CurvedpError, DataError
from curvedp.experiments.certificates import refuse_unnamed
from curvedp.experiments.federations import FederationConfig
from curvedp.experiments.processes import (
    environment_of,
    flwr,
    free_port,
    joined_address,
    reached_at,
    refuse_taken,
    running,
    split_address,
    tail_of,
    tool,
    wait_for_port,
)
from curvedp.experiments.terms import ClientTerms
from curvedp.storage import read_json, write_atomically, write_json

__all__ = ["run_client", "run_server"]

_STATUS_SECONDS = 10.0
_AGAIN_SECONDS, _LONG_SECONDS = 5.0, 60.0
_APP = """\
from curvedp.experiments.flower_app import client_app, server_app

client = client_app(secure={secure!r})
server = server_app(timeout={timeout!r}, wait_for={wait_for!r})
"""
_PROJECT = """\
[project]
name = "curvedp-federation"
version = "1.0.0"
description = "A federation of curvedp"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "curvedp"

[tool.flwr.app.components]
serverapp = "curvedp_app:server"
clientapp = "curvedp_app:client"

[tool.flwr.app.config]
run-dir = {run_dir}
federation = {federation}
"""


# -- the server ------------------------------------------------------------------------


def run_server(
    config: FederationConfig,
    run_dir: Path,
    *,
    address: str,
    keys: Path | None,
    timeout: float = 600.0,
    wait_for: int = 1,
) -> dict[str, Any]:
    """Run a SuperLink and the federation on it until all rounds are made.

    A folder with a run in it goes on with that run.

    Args:
        config: with declared sizes.
        run_dir: of the server.
        address: ``host:port`` that clients connect to.
        keys: folder of :func:`make_keys`; None for no TLS and no authentication, which
            is for tests on one machine.
        timeout: seconds that a round waits.
        wait_for: clients that the first round waits for. Later ones wait for as many as
            a round needs.

    Returns:
        What ``result.json`` says.
    """
    host, port = split_address(address)
    here = reached_at(host)
    if keys is not None:
        refuse_unnamed(keys, here)
    refuse_taken(here, port)
    folder = run_dir.absolute()
    home, bundle = folder / "flower", folder / "app"
    for needed in (home, bundle):
        needed.mkdir(parents=True, exist_ok=True)
    (bundle / "curvedp_app.py").write_text(
        _APP.format(timeout=timeout, wait_for=wait_for, secure=config.is_secure)
    )
    (bundle / "pyproject.toml").write_text(
        _PROJECT.format(
            run_dir=json.dumps(str(folder)),
            federation=json.dumps(json.dumps(_without_none(config.to_json()))),
        )
    )
    secured = ["--insecure"]
    connection = f'address = "{joined_address(here, port)}"\n'
    if keys is not None:
        keys = keys.absolute()
        secured = [
            "--ssl-ca-certfile", str(keys / "ca.crt"),
            "--ssl-certfile", str(keys / "server.crt"),
            "--ssl-keyfile", str(keys / "server.key"),
            "--enable-supernode-auth",
        ]  # fmt: skip
        connection += f'root-certificates = "{keys / "ca.crt"}"\n'
    else:
        connection += "insecure = true\n"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}'
    )
    environment = environment_of(home)
    command = [
        tool("flower-superlink"), *secured, "--host", host, "--port", str(port),
        "--disable-runtime-dependency-installation",
        # nodes that were known before a restart are known after it
        "--database", str(home / "superlink.db"),
    ]  # fmt: skip
    result, log = folder / "result.json", folder / "superlink.log"
    result.unlink(missing_ok=True)  # one of an earlier start says nothing of this one
    with running(command, environment, log) as superlink:
        wait_for_port(here, port, superlink, log)
        if keys is not None:
            for key in _public_keys(keys, len(config.sizes)):
                _register(environment, key, home / "nodes.json")
        flwr(environment, "run", str(bundle), "here")
        asked = time.monotonic()
        while not result.exists():
            time.sleep(0.5)
            if superlink.poll() is not None:
                raise CurvedpError(
                    "the SuperLink has stopped", f"its last lines: {tail_of(log)}"
                )
            if time.monotonic() - asked < _STATUS_SECONDS:
                continue
            asked, status = time.monotonic(), _status(environment)
            if status.startswith("finished") and not result.exists():
                raise CurvedpError(
                    f"the federation has ended without a result ({status})",
                    f"read {log}; start it again to go on where it stopped",
                )
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _public_keys(keys: Path, clients: int) -> list[Path]:
    """Of all clients, in the order of their numbers."""
    found = [keys / f"client-{number}.pub" for number in range(clients)]
    missing = [path.name for path in found if not path.exists()]
    if missing:
        raise ConfigurationError(
            f"{keys} has no {missing[0]}, and the federation has {clients} clients",
            f"make keys with: curvedp federated keys keys --clients {clients}",
        )
    return found


def _register(environment: dict[str, str], key: Path, known: Path) -> None:
    """Let a client's key in, and remember which node it is.

    A node has the same number after a restart, with the same database. So a client that
    has a key, and says that it is another one, is found.
    """
    nodes = read_json(known) if known.exists() else {}
    number = int(key.stem.removeprefix("client-"))
    text = flwr(
        environment, "supernode", "register", str(key), "here", "--format", "json"
    )
    with contextlib.suppress(ValueError, KeyError, TypeError):
        node = int(json.loads(text)["node-id"])
        nodes = {n: c for n, c in nodes.items() if c != number} | {str(node): number}
        write_atomically(known, lambda path: write_json(path, nodes))
    if number not in nodes.values():
        raise CurvedpError(
            f"Flower knows {key.name}, and {known} does not say which node it is",
            f"remove {known.with_name('superlink.db')}: keys are then registered anew",
        )


def _status(environment: dict[str, str]) -> str:
    done = flwr(environment, "list", "here", "--format", "json", check=False)
    with contextlib.suppress(ValueError, KeyError, IndexError):
        return str(json.loads(done)["runs"][0]["status"])
    return ""


# -- a client --------------------------------------------------------------------------


def run_client(
    number: int,
    run_dir: Path,
    *,
    superlink: str,
    keys: Path | None,
    data: str = "",
    config: Path | None = None,
    max_epsilon: float | None = None,
    delta: float | None = None,
    port: int = 0,
    patience: float = 3600.0,
) -> None:
    """Run a SuperNode until it is stopped.

    One that gives up is started again: the server may not be there yet, or may not know
    this client's key yet.

    Args:
        number: which client this is.
        run_dir: its folder, which remembers what it has spent.
        superlink: ``host:port`` of the server.
        keys: folder with ``ca.crt`` and ``client-<number>.key``; None without TLS.
        data: its records; empty takes its part of the config's data (demonstrations).
        config: its own file; a federation that differs from it is refused.
        max_epsilon: its own limit; see :class:`curvedp.experiments.terms.ClientTerms`.
        delta: of that limit.
        port: of the node's own processes on this machine; 0 takes a free one.
        patience: seconds in which it is started again and again before it is given up.

    Raises:
        ConfigurationError: an address, a number, keys or terms that cannot be used.
        DataError: there are no such records.
        CurvedpError: the node did not run for that long.
    """
    own = None if config is None else FederationConfig.read(config)
    # refused here, and not in every round, or again and again until patience ends
    ClientTerms(own, max_epsilon, delta)
    _check_client(number, own, superlink, keys, data)
    folder = run_dir.absolute()
    _quoted(folder)  # before anything is made there
    home = folder / "flower"
    home.mkdir(parents=True, exist_ok=True)
    node = f"client={number} run-dir={_quoted(folder)}"
    if config is not None:
        node += f" config={_quoted(config.absolute())}"
    limits = {"max-epsilon": max_epsilon, "delta": delta}
    node += "".join(f" {k}={float(v)!r}" for k, v in limits.items() if v is not None)
    if data:
        named = Path(data).absolute() if Path(data).exists() else data
        node += f" data={_quoted(named)}"
    secured = ["--insecure"]
    if keys is not None:
        secured = [
            "--root-certificates", str(keys.absolute() / "ca.crt"),
            "--auth-supernode-private-key",
            str(keys.absolute() / f"client-{number}.key"),
        ]  # fmt: skip
    command = [
        tool("flower-supernode"), *secured, "--superlink", superlink,
        "--node-config", node,
    ]  # fmt: skip
    failing_since = time.monotonic()
    while time.monotonic() - failing_since < patience:
        started = time.monotonic()
        own_port = ["--port", str(port or free_port())]
        with running([*command, *own_port], environment_of(home), None) as supernode:
            code = supernode.wait()
        if time.monotonic() - started > _LONG_SECONDS:  # it ran; the server went away
            failing_since = time.monotonic()
        time.sleep(_AGAIN_SECONDS)
    raise CurvedpError(
        f"the SuperNode ends again and again, the last time with code {code}",
        f"is the server at {superlink}, and does it have client-{number}.pub?",
    )


def _check_client(
    number: int,
    own: FederationConfig | None,
    superlink: str,
    keys: Path | None,
    data: str,
) -> None:
    """Refuse what no server could make good."""
    split_address(superlink)
    if number < 0 or (own is not None and number >= len(own.sizes)):
        known = "from 0" if own is None else f"from 0 to {len(own.sizes) - 1}"
        raise ConfigurationError(
            f"there is no client {number}", f"clients are numbered {known}"
        )
    for name in () if keys is None else ("ca.crt", f"client-{number}.key"):
        if keys is not None and not (keys / name).is_file():
            raise ConfigurationError(
                f"{keys} has no {name}",
                "the server's side makes it (curvedp federated keys) and gives it to "
                "this client",
            )
    if data and data != "digits" and not Path(data).exists():
        raise DataError(
            f"{data}: there is no such file or folder", "give the path of the records"
        )


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _quoted(value: Path | str) -> str:
    """A path as Flower reads it; it would end at a quotation mark, in another folder.

    Raises:
        ConfigurationError: it has a character that cannot be quoted.
    """
    text = str(value)
    if '"' in text or "\\" in text or not text.isprintable():
        raise ConfigurationError(
            f"Flower cannot be told the path {text!r}",
            "name it without quotation marks, backslashes and control characters",
        )
    return f'"{text}"'
