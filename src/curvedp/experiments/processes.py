"""Processes of a deployment: Flower's commands, their addresses, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError, CurvedpError, missing_extra

__all__ = [
    "environment_of",
    "flwr",
    "free_port",
    "joined_address",
    "reached_at",
    "refuse_taken",
    "running",
    "split_address",
    "tail_of",
    "tool",
    "wait_for_port",
]


@contextlib.contextmanager
def running(
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


def environment_of(home: Path) -> dict[str, str]:
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


def flwr(environment: dict[str, str], *arguments: str, check: bool = True) -> str:
    """What a command of Flower's prints; one that fails is refused if it is checked."""
    done = subprocess.run(
        [tool("flwr"), *arguments],
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


def tool(name: str) -> str:
    """Where a command of Flower's is: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise missing_extra("flwr", "flower")
    return found


def split_address(address: str) -> tuple[str, int]:
    """Host and port; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"the address {address!r}", "write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def joined_address(host: str, port: int) -> str:
    """What :func:`split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reached_at(host: str) -> str:
    """Where this machine reaches what listens on a host.

    One that is not its own is refused: everything would wait for it.
    """
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        )
        with socket.socket(family, socket.SOCK_STREAM) as found:
            found.bind(place)
    except OSError as error:
        raise ConfigurationError(
            f"this machine cannot listen on {host}: {error.strerror or error}",
            "give an address of this machine, or 0.0.0.0 for all of them; clients "
            "take another one with --superlink",
        ) from error
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def wait_for_port(
    host: str, port: int, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until a process listens, or say what it printed last."""
    for _ in range(240):
        if process.poll() is not None:
            break
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), timeout=1),
        ):
            return
        time.sleep(0.5)
    raise CurvedpError("the SuperLink did not start", f"its last lines: {tail_of(log)}")


def refuse_taken(host: str, port: int) -> None:
    """Refuse a port that somebody listens on already."""
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        raise ConfigurationError(
            f"port {port} is in use on this machine",
            "stop the SuperLink that is still running, or take another port",
        )


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    return log.read_text(errors="replace")[-800:]
