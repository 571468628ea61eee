"""``curvedp privacy``: calibrate noise, compute epsilon, read a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from curvedp.accounting import (
    LedgerRecord,
    calibrate_sigma,
    calibrate_steps,
    epsilon_of,
    read_ledger,
)
from curvedp.barrier import Relation
from curvedp.cli.output import print_json, reports_errors, results, rows_of
from curvedp.cli.parameters import JsonFlag
from curvedp.errors import ConfigurationError, LedgerError, NotPrivateError
from curvedp.federated import View
from curvedp.train.witnesses import check_ledger, witnesses

__all__ = ["app"]

app = typer.Typer(
    help="Calibrate noise, compute epsilon, read a ledger.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UNCHAINED = (
    "none: a ledger of version 1, whose lines carry no checksums; an edited or removed "
    "line would not be found"
)

Delta = Annotated[float, typer.Option(help="Of (epsilon, delta).")]
SampleRate = Annotated[
    float, typer.Option(help="Chance of an example to be in a step's batch.")
]
RelationOption = Annotated[
    str, typer.Option(help="add-remove, zero-out or replace-one.")
]
AccountantOption = Annotated[str, typer.Option(help="pld (tight) or rdp.")]


@app.command(
    epilog="Example: curvedp privacy calibrate --epsilon 1 --delta 1e-5 "
    "--sample-rate 0.00426667 --steps 1170"
)
@reports_errors
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Budget.")],
    sample_rate: SampleRate,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps; gives sigma.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise multiplier; gives the steps.")
    ] = None,
    delta: Delta = 1e-5,
    relation: RelationOption = "add-remove",
    accountant: AccountantOption = "pld",
    json_output: JsonFlag = False,
) -> None:
    """Find the noise for a number of steps, or the steps that a noise allows.

    Sigma is rounded up, steps down: the budget is always met.
    """
    if (steps is None) == (sigma is None):
        raise ConfigurationError(
            "give either --steps (to find sigma) or --sigma (to find the steps)"
        )
    common: dict[str, Any] = {
        "sample_rate": sample_rate,
        "relation": Relation.parse(relation),
        "accountant": accountant,
    }
    if sigma is None:
        assert steps is not None
        sigma = calibrate_sigma(epsilon, delta, steps=steps, **common)
    else:
        steps = calibrate_steps(epsilon, delta, sigma=sigma, **common)
    assert steps is not None
    achieved = epsilon_of(sigma, steps=steps, delta=delta, **common)
    document = {
        "sigma": sigma,
        "steps": steps,
        "epsilon": epsilon,
        "epsilon_achieved": achieved,
        "delta": delta,
        "sample_rate": sample_rate,
        "relation": relation,
        "accountant": accountant,
    }
    _show(document, json_output)


@app.command(
    epilog="Example: curvedp privacy epsilon --sigma 1 --sample-rate 0.01 --steps 1000"
)
@reports_errors
def epsilon(
    sigma: Annotated[float, typer.Option(help="Noise / clip bound.")],
    sample_rate: SampleRate,
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: Delta = 1e-5,
    relation: RelationOption = "add-remove",
    accountant: AccountantOption = "pld",
    json_output: JsonFlag = False,
) -> None:
    """Compute the epsilon of Poisson-sampled Gaussian steps."""
    value = epsilon_of(
        sigma,
        sample_rate=sample_rate,
        steps=steps,
        delta=delta,
        relation=Relation.parse(relation),
        accountant=accountant,
    )
    document = {
        "epsilon": value,
        "sigma": sigma,
        "steps": steps,
        "delta": delta,
        "sample_rate": sample_rate,
        "relation": relation,
        "accountant": accountant,
    }
    _show(document, json_output)


@app.command(
    epilog="Example: curvedp privacy spent runs/digits-dp-sgd-.../ledger.jsonl"
)
@reports_errors
def spent(
    ledger: Annotated[Path, typer.Argument(help="Ledger, or the folder of its run.")],
    json_output: JsonFlag = False,
) -> None:
    """Recompute from a ledger what a run has spent.

    Needs neither the data nor the model. Beside the checkpoints and the journal of
    its run, the ledger must contain all that they have seen of it.
    """
    record = _read(_ledger_file(ledger))
    document = _account(record)
    if json_output:
        print_json(document)
        return
    if not document["private"]:
        results.print("NO PRIVACY GUARANTEE: see the notes", style="bold red")
    header = record.header
    planned = document["planned_epsilon"]
    pairs = [
        ("spent", f"epsilon {document['epsilon']:.4g} at delta {header.delta:g} "
                  "(if the number of steps was fixed beforehand)"),
        ("planned", "unknown" if planned is None
                    else f"epsilon {planned:.4g} for {header.planned_steps} steps: "
                    "holds whenever the run is stopped"),
        *_against(header.facts),
        ("unit", f"one {header.unit}"),
        ("relation", header.relation.value),
        ("accountant", header.accountant.upper()),
        ("payments", _payments(document)),
        ("gaps", _gaps(document["missing_steps"])),
        ("run", header.run_id),
    ]  # fmt: skip
    if not record.chained:
        pairs.append(("CHAIN", _UNCHAINED))
    if record.torn:
        pairs.append(("torn line", record.torn))
    pairs += [("NOTE", note) for note in record.notes()]
    results.print(rows_of(pairs, loud=("NOTE", "CHAIN")))


def _against(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of a federation: who the epsilon is against. Without that it means nothing."""
    if "view" not in facts:
        return []
    lost = {name: int(facts.get(name, 0)) for name in ("colluding", "dropouts")}
    return [("against", View.of(str(facts["view"]), **lost).text())]


def _ledger_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / "ledger.jsonl").exists() and (path / "run.json").exists():
        raise LedgerError(
            f"{path} has no ledger: its run is not private, or has not begun",
            "give the folder of a private run",
        )
    return path / "ledger.jsonl"


def _read(file: Path) -> LedgerRecord:
    # First what the other files have seen, then the ledger: a run may be going on.
    own = file.name == "ledger.jsonl"
    seen = witnesses(file.parent, tolerant=True) if own else []
    record = read_ledger(file)
    check_ledger(record, seen)
    return record


def _account(record: LedgerRecord) -> dict[str, Any]:
    header, notes = record.header, list(record.notes())
    if record.is_oracle:  # also before the first payment
        raise NotPrivateError(
            "NOT PRIVATE: the run took curvature from its private data (an oracle, for "
            "research), so no epsilon holds, whatever was paid",
            "run it with synthetic or public probes for a guarantee",
        )
    count, steps = record.count(), record.paid_steps()
    return {
        "epsilon": record.epsilon() if count else 0.0,
        "planned_epsilon": _planned_epsilon(record),
        "target_epsilon": header.target_epsilon,
        "delta": header.delta,
        "relation": header.relation.value,
        "unit": header.unit,
        "accountant": header.accountant,
        "payments": count,
        "paid_steps": len(steps),
        "repeated_payments": count - len(steps),
        "planned_steps": header.planned_steps,
        "gapless": record.is_gapless(),
        "missing_steps": list(record.missing_steps()),
        "private": not record.is_unsafe,
        "notes": notes,
        "torn": record.torn,
        "chained": record.chained,
        "run_id": header.run_id,
        "facts": dict(header.facts),
    }


def _planned_epsilon(record: LedgerRecord) -> float | None:
    """Epsilon of the whole plan, recomputed from what the header declares."""
    header = record.header
    sigma = header.facts.get("noise_multiplier")
    rate = header.facts.get("group_rate", header.facts.get("sample_rate"))
    steps = header.facts.get("rounds", header.planned_steps)  # draws of an example
    if sigma is None or rate is None or header.planned_steps is None:
        return header.target_epsilon
    try:
        return epsilon_of(
            sigma,
            sample_rate=rate,
            steps=steps,
            delta=header.delta,
            relation=header.relation,
            accountant=header.accountant,
        )
    except ConfigurationError as error:
        raise LedgerError(
            f"{record.path} plans what is impossible: {error.problem}",
            "restore the ledger from a copy",
        ) from error


def _payments(document: dict[str, Any]) -> str:
    text = f"{document['payments']} of {document['planned_steps']} planned"
    repeated = document["repeated_payments"]
    return f"{text}, {repeated} of them for steps run again" if repeated else text


def _gaps(missing: list[int]) -> str:
    if not missing:
        return "none"
    listed = ", ".join(map(str, missing[:10]))
    return f"{len(missing)} steps were never paid: {listed}"


def _show(document: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(document)
        return
    results.print(
        rows_of(
            [
                (name.replace("_", " "), f"{v:.6g}" if isinstance(v, float) else str(v))
                for name, v in document.items()
            ]
        )
    )
