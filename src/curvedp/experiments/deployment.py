"""Real processes: a Flower SuperLink here, SuperNodes there, over TLS with known keys.

The server's machine runs ``flower-superlink`` and the app of the federation; every
client's machine runs ``flower-supernode``, which connects to it. Certificates make sure
that clients talk to the server, and keys that it talks to clients it knows: Flower
refuses a node whose public key was not registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError, CurvedpError, missing_extra
from curvedp.experiments.federations import FederationConfig
from curvedp.experiments.terms import ClientTerms
from curvedp.storage import make_folder

__all__ = ["make_keys", "run_client", "run_server"]

_DAYS = 365
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


# -- keys and certificates -------------------------------------------------------------


def make_keys(folder: Path, clients: int, hosts: Sequence[str]) -> None:
    """A certificate authority, the server's certificate, and a key for each client.

    ``ca.crt`` goes to everybody; ``server.key`` stays on the server; ``client-3.key``
    goes to client 3 alone, and its public half ``client-3.pub`` to the server.

    Args:
        folder: made anew; never one that exists.
        clients: how many.
        hosts: names and addresses of the server.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise missing_extra("cryptography", "secure") from None
    if folder.exists():
        raise ConfigurationError(
            f"{folder} exists already, and keys are never overwritten",
            "name a folder that does not exist",
        )
    make_folder(folder)
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()

    def new_key(name: str, kind: Any = serialization.PrivateFormat.PKCS8) -> Any:
        key = ec.generate_private_key(ec.SECP384R1())
        path = folder / f"{name}.key"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(key.private_bytes(encoding, kind, plain))
        return key

    def name_of(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(key: Any, name: Any, *extensions: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(root, hashes.SHA256()).public_bytes(encoding)

    authority = name_of("curvedp federation")
    root = new_key("ca")
    root_id = x509.SubjectKeyIdentifier.from_public_key(root.public_key())
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True,
        crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "ca.crt").write_bytes(
        certificate(
            root, authority, (constraints, True), (usage, True), (root_id, False)
        )
    )
    server = new_key("server")
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
    names = x509.SubjectAlternativeName([_alternative(x509, host) for host in hosts])
    (folder / "server.crt").write_bytes(
        certificate(server, name_of(hosts[0]), (names, False), (issued_by, False))
    )
    for number in range(clients):
        secret = new_key(f"client-{number}", serialization.PrivateFormat.OpenSSH)
        public, kind = secret.public_key(), serialization.PublicFormat.OpenSSH
        text = public.public_bytes(serialization.Encoding.OpenSSH, kind)
        (folder / f"client-{number}.pub").write_bytes(text + b"\n")


def _alternative(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


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
        wait_for: clients that a round waits for.

    Returns:
        What ``result.json`` says.
    """
    host, port = _split(address)
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
    connection = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    if keys is not None:
        keys = keys.absolute()
        secured = [
            "--ssl-ca-certfile", str(keys / "ca.crt"),
            "--ssl-certfile", str(keys / "server.crt"),
            "--ssl-keyfile", str(keys / "server.key"),
            "--enable-supernode-auth",
        ]  # fmt: skip
        connection = (
            f'address = "127.0.0.1:{port}"\nroot-certificates = "{keys / "ca.crt"}"\n'
        )
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}'
    )
    _refuse_taken(port)
    environment = _environment(home)
    command = [
        _tool("flower-superlink"), *secured, "--host", host, "--port", str(port),
        "--disable-runtime-dependency-installation",
        # nodes that were known before a restart are known after it
        "--database", str(home / "superlink.db"),
    ]  # fmt: skip
    result, log = folder / "result.json", folder / "superlink.log"
    with _process(command, environment, log) as superlink:
        _wait_for_port(port, superlink, log)
        if keys is not None:
            for key in sorted(keys.glob("client-*.pub")):
                _flwr(environment, "supernode", "register", str(key), "here")
        _flwr(environment, "run", str(bundle), "here")
        asked = time.monotonic()
        while not result.exists():
            time.sleep(0.5)
            if superlink.poll() is not None:
                raise CurvedpError(
                    "the SuperLink has stopped", f"its last lines: {_tail(log)}"
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


def _status(environment: dict[str, str]) -> str:
    done = _flwr(environment, "list", "here", "--format", "json", check=False)
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
        CurvedpError: the node did not run for that long.
    """
    own = None if config is None else FederationConfig.read(config)
    ClientTerms(own, max_epsilon, delta)  # refused here, and not in every round
    folder = run_dir.absolute()
    home = folder / "flower"
    home.mkdir(parents=True, exist_ok=True)
    node = f'client={number} run-dir="{folder}"'
    if config is not None:
        node += f' config="{config.absolute()}"'
    limits = {"max-epsilon": max_epsilon, "delta": delta}
    node += "".join(
        f" {k}={float(v)!r}" for k, v in limits.items() if v is not None
    )
    if data:
        node += f' data="{Path(data).absolute() if Path(data).exists() else data}"'
    secured = ["--insecure"]
    if keys is not None:
        secured = [
            "--root-certificates", str(keys.absolute() / "ca.crt"),
            "--auth-supernode-private-key",
            str(keys.absolute() / f"client-{number}.key"),
        ]  # fmt: skip
    command = [
        _tool("flower-supernode"), *secured, "--superlink", superlink,
        "--node-config", node,
    ]  # fmt: skip
    failing_since = time.monotonic()
    while time.monotonic() - failing_since < patience:
        started = time.monotonic()
        own_port = ["--port", str(port or _free_port())]
        with _process([*command, *own_port], _environment(home), None) as supernode:
            code = supernode.wait()
        if time.monotonic() - started > _LONG_SECONDS:  # it ran; the server went away
            failing_since = time.monotonic()
        time.sleep(_AGAIN_SECONDS)
    raise CurvedpError(
        f"the SuperNode ends again and again, the last time with code {code}",
        f"is the server at {superlink}, and does it have client-{number}.pub?",
    )


# -- processes -------------------------------------------------------------------------


@contextlib.contextmanager
def _process(
    command: list[str], environment: dict[str, str], log: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, whatever ends the block."""
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab"))
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            # no other thread runs here yet
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        # a plain `kill` ends Python without unwinding the block
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """On Linux: the child gets SIGTERM when this process dies, however it dies."""
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGTERM)


def _environment(home: Path) -> dict[str, str]:
    """Flower without telemetry, with a home of its own and one thread a process."""
    tools = str(Path(sys.executable).parent)
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PATH": tools + os.pathsep + os.environ.get("PATH", ""),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def _flwr(environment: dict[str, str], *arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        [_tool("flwr"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    known = "already" in done.stdout + done.stderr  # a key of an earlier start
    if check and done.returncode and not known:
        raise CurvedpError(
            f"flwr {arguments[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}"
        )
    return done.stdout


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise missing_extra("flwr", "flower")
    return found


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"the address {address!r}", "write host:port")
    return host, int(port)


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        if process.poll() is not None:
            break
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1),
        ):
            return
        time.sleep(0.5)
    raise CurvedpError("the SuperLink did not start", f"its last lines: {_tail(log)}")


def _refuse_taken(port: int) -> None:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        raise ConfigurationError(
            f"port {port} is in use on this machine",
            "stop the SuperLink that is still running, or take another port",
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-800:]


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}
