"""A federation of real processes, with kills: is the run what an unbroken one is?

One server and four clients on this machine, over TLS with known keys, ten rounds. A
client is killed in round 3 and started again in round 5; the server is killed in round
7 and started again. Afterwards: epsilon as planned, every ledger whole and none above
its budget, and an accuracy near that of an unbroken run.

    python benchmarks/federated_processes.py --data digits --folder runs/federated
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from curvedp.accounting import read_ledger
from curvedp.experiments.certificates import make_keys
from curvedp.experiments.federations import FederationConfig, serve
from curvedp.federated.rounds import asking

CLIENTS, ROUNDS = 4, 10
#: (round after which it happens, what)
CLIENT_DIES, CLIENT_BACK, SERVER_DIES = 2, 4, 6
CLI = [sys.executable, "-c", "from curvedp.cli import main; raise SystemExit(main())"]


def config_for(data, size, epsilon, delta, settings, view="each-client"):
    secure = view == "secure-aggregate"
    return {
        "data": data,
        "model": "logreg",
        "recipe": "dp-fedgd+momentum",
        "settings": settings,
        "sizes": [size] * CLIENTS,
        "rounds": ROUNDS,
        "epsilon": epsilon,
        "delta": delta,
        "least_clients": 3,
        "view": view,
        "dropouts": 1 if secure else 0,
    }


def to_toml(config):
    def value(v):
        return json.dumps(v) if not isinstance(v, bool) else str(v).lower()

    plain = {k: v for k, v in config.items() if not isinstance(v, dict)}
    lines = [f"{k} = {value(v)}" for k, v in plain.items()]
    for name, table in config.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


class Processes:
    """The command line, as users start it."""

    def __init__(self, folder, port):
        self.folder, self.port, self.running = folder, port, {}

    def start(self, name, *arguments):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*CLI, "federated", *arguments],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def server(self):
        self.start(
            "server", "server", "federation.toml", "--run-dir", "server", "--keys",
            "keys", "--address", f"127.0.0.1:{self.port}", "--timeout", "120",
            "--wait-for", "3",
        )  # fmt: skip

    def client(self, number):
        self.start(
            f"client-{number}", "client", str(number), "--run-dir", f"client-{number}",
            "--keys", "keys", "--superlink", f"127.0.0.1:{self.port}",
        )  # fmt: skip

    def kill(self, name):
        """Without warning, and all that it had started."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self):
        for name in list(self.running):
            self.kill(name)

    def rounds_made(self):
        folders = sorted((self.folder / "server" / "checkpoints").glob("step-*"))
        return int(folders[-1].name.removeprefix("step-")) if folders else 0

    def wait_for_round(self, count, seconds=900):
        end = time.monotonic() + seconds
        while self.rounds_made() < count:
            if self.running["server"].poll() is not None:
                return  # it has ended; the checks say how
            if time.monotonic() > end:
                raise TimeoutError(f"round {count} was not made in {seconds} seconds")
            time.sleep(0.5)


def broken_run(folder, config, port):
    folder.mkdir(parents=True)
    (folder / "federation.toml").write_text(to_toml(config))
    make_keys(folder / "keys", CLIENTS, ["localhost", "127.0.0.1"])
    world = Processes(folder, port)
    try:
        world.server()
        for number in range(CLIENTS):
            world.client(number)
        world.wait_for_round(CLIENT_DIES)
        world.kill("client-1")
        world.wait_for_round(CLIENT_BACK)
        world.client(1)
        world.wait_for_round(SERVER_DIES)
        time.sleep(3)  # in the middle of the next round
        world.kill("server")
        world.server()
        world.wait_for_round(ROUNDS)
        world.running["server"].wait(120)
    finally:
        world.stop()
    return json.loads((folder / "server" / "result.json").read_text())


def unbroken_run(config):
    settings = FederationConfig.from_mapping(config)
    source = settings.source()
    together = settings.shared(source)
    clients = {
        i: settings.client(i, together, part)
        for i, part in enumerate(settings.parts(source.train))
    }
    server = settings.server(settings.shared(source))
    return serve(server, asking(clients), source.test).to_json()


def without_masks(config):
    """The same noise for an unbroken run in one process, where nobody looks."""
    plan = FederationConfig.from_mapping(config).plan()
    lone = {k: v for k, v in config.items() if k not in ("view", "dropouts", "epsilon")}
    return {**lone, "noise_multiplier": plan.noise_multiplier}


def check(folder, config, broken, unbroken):
    """What must hold; the findings as one document."""
    plan = FederationConfig.from_mapping(config).plan()
    record = read_ledger(folder / "server" / "ledger.jsonl")
    paid = {
        i: read_ledger(folder / f"client-{i}" / "ledger.jsonl").paid_steps()
        for i in range(CLIENTS)
    }
    counts = {
        i: read_ledger(folder / f"client-{i}" / "ledger.jsonl").count()
        for i in range(CLIENTS)
    }
    lines = (folder / "server" / "rounds.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines]
    return {
        "planned epsilon": plan.epsilon(),
        "ledger epsilon": record.epsilon(),
        "server payments": record.count(),
        "server gapless": record.is_gapless(),
        "client rounds": {i: list(steps) for i, steps in paid.items()},
        "client payments": counts,
        "rounds": [int(r["round"]) for r in last],
        "clients by round": [int(r["clients"]) for r in last],
        "accuracy": last[-1]["accuracy"],
        "unbroken accuracy": unbroken["rounds"][-1]["accuracy"],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="digits")
    parser.add_argument("--size", type=float, default=359.0)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--learning-rate", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--view", default="each-client")
    parser.add_argument("--port", type=int, default=9811)
    asked = parser.parse_args()
    settings = {"learning_rate": asked.learning_rate}
    config = config_for(
        asked.data, asked.size, asked.epsilon, asked.delta, settings, asked.view
    )
    started = time.monotonic()
    broken = broken_run(asked.folder, config, asked.port)
    unbroken = unbroken_run(without_masks(config))
    found = check(asked.folder, config, broken, unbroken)
    print(json.dumps({**found, "seconds": time.monotonic() - started}, indent=2))


if __name__ == "__main__":
    main()
