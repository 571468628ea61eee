"""``curvedp federated``: simulate a federation, or run its server and its clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from curvedp.cli.options import parse_pairs
from curvedp.cli.output import (
    bars,
    log,
    print_json,
    reports_errors,
    results,
    rows_of,
    tell,
)
from curvedp.cli.parameters import JsonFlag
from curvedp.errors import ConfigurationError
from curvedp.experiments.certificates import make_keys
from curvedp.experiments.deployment import run_client, run_server
from curvedp.experiments.federations import FederationConfig, FederationResult
from curvedp.experiments.simulation import simulate as run_simulation
from curvedp.federated import Observer, View
from curvedp.federated.plan import FederatedPlan

__all__ = ["app"]

app = typer.Typer(
    help="Train together without pooling data.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="TOML file; options below go before it.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="SETTING=VALUE of the recipe; repeatable."),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(help="Folder of `curvedp federated keys`; TLS and known clients."),
]
InsecureFlag = Annotated[
    bool, typer.Option("--insecure", help="No TLS: for tests on one machine.")
]


def _config(path: Path | None, own: dict[str, Any], pairs: list[str] | None) -> Any:
    base = FederationConfig() if path is None else FederationConfig.read(path)
    given = {k: v for k, v in own.items() if v is not None}
    if pairs:
        given["settings"] = {**base.settings, **parse_pairs(pairs, "--set")}
    return FederationConfig.from_mapping({**base.to_json(), **given})


@app.command(
    epilog="Example: curvedp federated simulate --recipe dp-fedsofim --clients 10 "
    "--rounds 20 --epsilon 3 --delta 1e-4"
)
@reports_errors
def simulate(
    config: ConfigArgument = None,
    data: Annotated[str | None, typer.Option(help="As `curvedp train`.")] = None,
    public_data: Annotated[
        str | None, typer.Option(help="Declared public, for --set probe=public.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="As `curvedp train`.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A federated one; see `curvedp recipes`.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Of the recipe.")] = None,
    recipe_setting: SetOption = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget, for the view.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="In place of it.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of (epsilon, delta).")] = None,
    view: Annotated[
        str | None,
        typer.Option(help="each-client, secure-aggregate or trusted-aggregate."),
    ] = None,
    colluding: Annotated[
        int | None, typer.Option(help="Clients that tell their noise.")
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="Clients that a secure aggregate may miss.")
    ] = None,
    relation: Annotated[
        str | None, typer.Option(help="add-remove, zero-out or replace-one.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="iid, or dirichlet:ALPHA.")
    ] = None,
    client_rate: Annotated[
        float | None, typer.Option(help="Chance of a client to be in a round.")
    ] = None,
    record_rate: Annotated[
        float | None, typer.Option(help="Chance of a record to be drawn.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything public.")] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes of Flower's simulation engine (Ray) that clients are "
            "spread over; 0: this one alone."
        ),
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw accuracy by round (PNG, PDF, SVG).")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Split a dataset between clients and train, through Flower, on this machine.

    Clients and server are those of a deployment; messages are Flower's.
    """
    own = {
        "data": data, "public_data": public_data, "model": model, "recipe": recipe,
        "mode": mode,
        "clients": clients, "rounds": rounds, "epsilon": epsilon,
        "noise_multiplier": noise_multiplier, "delta": delta, "view": view,
        "colluding": colluding, "dropouts": dropouts, "relation": relation,
        "partition": partition,
        "client_rate": client_rate, "record_rate": record_rate, "seed": seed,
    }  # fmt: skip
    settings = _config(config, own, recipe_setting)
    with bars() as shown:
        task = shown.add_task("rounds", total=settings.rounds, remark="")

        def report(row: dict[str, float]) -> None:
            remark = f"accuracy {row['accuracy']:.3f}" if "accuracy" in row else ""
            shown.update(task, completed=row["round"], remark=remark)
            tenth = max(1, settings.rounds // 10)
            if not log.is_terminal and row["round"] % tenth == 0:
                tell(f"round {row['round']:.0f}/{settings.rounds} {remark}")

        found = run_simulation(settings, workers=workers, on_round=report)
    _print_result(found, settings, plot, json_output)


@app.command(
    epilog="Example: curvedp federated views --clients 20 --rounds 70 --epsilon 1"
)
@reports_errors
def views(
    config: ConfigArgument = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    size: Annotated[
        float, typer.Option(help="Declared records of each client.")
    ] = 2500.0,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Budget, for each view.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="In place of it.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of (epsilon, delta).")] = None,
    relation: Annotated[
        str | None, typer.Option(help="add-remove, zero-out or replace-one.")
    ] = None,
    colluding: Annotated[
        int | None, typer.Option(help="Clients that tell their noise.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """What the same federation costs, by who sees what."""
    own = {
        "clients": clients, "rounds": rounds, "epsilon": epsilon, "delta": delta,
        "noise_multiplier": noise_multiplier, "relation": relation,
    }  # fmt: skip
    settings = _config(config, own, None)
    if not settings.sizes:
        settings = replace(settings, sizes=(size,) * settings.clients)
    rows = []
    for observer in Observer:
        alone = observer is Observer.EACH_CLIENT
        lost = settings.colluding if colluding is None else colluding
        plan = replace(
            settings,
            view=observer.value,
            colluding=0 if alone else lost,
            dropouts=0 if alone else settings.dropouts,
        ).plan()
        rows.append(_view_row(plan))
    if json_output:
        print_json({"views": rows})
        return
    results.print(_table(rows, list(rows[0])))


def _view_row(plan: FederatedPlan) -> dict[str, Any]:
    return {
        "view": plan.view.observer.value,
        "colluding": plan.view.colluding,
        "relation": plan.federation.relation.value,
        "noise s": round(plan.noise_multiplier, 4),
        "epsilon": round(plan.epsilon(), 4),
        "if the server looks": round(plan.epsilon(view=View()), 4),
    }


@app.command(epilog="Example: curvedp federated keys keys --clients 4 --host localhost")
@reports_errors
def keys(
    folder: Annotated[Path, typer.Argument(help="Made anew.")],
    clients: Annotated[int, typer.Option(help="Number of clients.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the server; repeatable."),
    ] = None,
) -> None:
    """Make certificates for the server and a key for every client."""
    make_keys(folder, clients, [*(host or []), "localhost", "127.0.0.1"])
    tell(f"keys in {folder}: ca.crt to everybody, client-N.key to client N alone")


@app.command(
    epilog="Example: curvedp federated server federation.toml --run-dir server "
    "--keys keys --address 0.0.0.0:9800"
)
@reports_errors
def server(
    config: Annotated[Path, typer.Argument(help="TOML file, with sizes.")],
    run_dir: Annotated[Path, typer.Option(help="A run in it goes on.")],
    address: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = (
        "127.0.0.1:9800"
    ),
    keys: KeysOption = None,
    insecure: InsecureFlag = False,
    timeout: Annotated[float, typer.Option(help="Seconds a round waits.")] = 600.0,
    wait_for: Annotated[
        int | None,
        typer.Option(help="Clients the first round waits for.", show_default="all"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw accuracy by round (PNG, PDF, SVG).")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Run the server: a Flower SuperLink and the federation on it."""
    settings = FederationConfig.read(config).declared()
    _require_keys(keys, insecure)
    for name, text in settings.plan().statement():
        tell(f"{name}: {text}", style="dim")
    found = run_server(
        settings,
        run_dir,
        address=address,
        keys=keys,
        timeout=timeout,
        wait_for=len(settings.sizes) if wait_for is None else wait_for,
    )
    result = FederationResult(
        found["rounds"], list(found["statement"].items()), found["epsilon"]
    )
    _print_result(result, settings, plot, json_output)


@app.command(
    epilog="Example: curvedp federated client 3 --run-dir client-3 --keys keys "
    "--superlink server.example.org:9800 --data records.npz"
)
@reports_errors
def client(
    number: Annotated[int, typer.Argument(help="Which client this is, from 0.")],
    run_dir: Annotated[Path, typer.Option(help="Remembers what it has spent.")],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = (
        "127.0.0.1:9800"
    ),
    keys: KeysOption = None,
    insecure: InsecureFlag = False,
    data: Annotated[
        str, typer.Option(help="Its records; without them its part of the config's.")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="Its own TOML file; it refuses another federation."),
    ] = None,
    max_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Most that all rounds may cost: against the server, or in the view of "
            "its own config."
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Of that limit; the config's by default.")
    ] = None,
) -> None:
    """Run one client: a Flower SuperNode, until it is stopped."""
    _require_keys(keys, insecure)
    if config is None and max_epsilon is None:
        tell(
            "this client takes part in whatever the server describes: --config and "
            "--max-epsilon are terms of its own",
            style="dim",
        )
    run_client(
        number,
        run_dir,
        superlink=superlink,
        keys=keys,
        data=data,
        config=config,
        max_epsilon=max_epsilon,
        delta=delta,
    )


def _require_keys(keys: Path | None, insecure: bool) -> None:
    if (keys is None) != insecure:
        raise ConfigurationError(
            "give either --keys (TLS, and clients that are known) or --insecure",
            "make them with: curvedp federated keys keys --clients 4",
        )


def _print_result(
    result: FederationResult,
    config: FederationConfig,
    plot: Path | None,
    json_output: bool,
) -> None:
    if plot is not None:
        from curvedp.experiments.plots import plot_rounds

        title = f"{config.recipe}, {config.view}, epsilon {result.epsilon:.3g}"
        tell(f"plot: {plot_rounds(result.rows, plot, title=title)}", style="dim")
    if json_output:
        print_json(result.to_json())
        return
    every = max(1, len(result.rows) // 10)
    chosen = [r for i, r in enumerate(result.rows, start=1) if i % every == 0]
    if chosen:
        results.print(_table(chosen, list(chosen[0])))
    results.print(rows_of(result.statement))


def _table(rows: list[dict[str, Any]], columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_shown(c, row[c]) for c in columns))
    return table


def _shown(column: str, value: Any) -> str:
    if column in ("round", "clients"):
        return f"{value:.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
