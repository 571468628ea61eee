"""``curvedp doctor``: can this model be trained privately, and at what cost?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from curvedp.cli.options import parse_pairs
from curvedp.cli.output import print_json, reports_errors, results, rows_of, tell
from curvedp.cli.parameters import JsonFlag
from curvedp.diagnostics import (
    Change,
    Diagnosis,
    LayerReport,
    Problem,
    Subject,
    Verdict,
    diagnose,
    fix,
    load_subject,
    write_fixed,
)
from curvedp.diagnostics.report import ratio
from curvedp.diagnostics.writing import fixed_path
from curvedp.errors import ConfigurationError

__all__ = ["register"]

#: Names that are spelt out where many layers share one row or one problem.
_SPELT_OUT = 4
_STYLES = {
    Verdict.READY: "bold green",
    Verdict.READY_AFTER_FIX: "bold yellow",
    Verdict.NOT_POSSIBLE: "bold red",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: curvedp doctor nets:resnet --input-shape 3,32,32. "
        "Exit code: 0 ready, 1 not ready, 2 error."
    )(doctor)


@reports_errors
def doctor(
    model: Annotated[
        str,
        typer.Argument(
            help="module:factory or a built-in name. The factory gives a model, or "
            "(model, example_inputs)."
        ),
    ],
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one input, e.g. 3,32,32.")
    ] = None,
    input_dtype: Annotated[str, typer.Option(help="float or int.")] = "float",
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Token ids are below this.", show_default="the smallest embedding"
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Physical batch size of the estimates.")
    ] = 256,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the factory; repeatable.")
    ] = None,
    fix_file: Annotated[
        Path | None,
        typer.Option(
            "--fix",
            help="Write a new .py file (or into a folder) whose factory() makes the "
            "model with replacements, and examine that.",
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say layer by layer whether a model can be trained privately, and at what cost.

    Only synthetic inputs are used. All problems are reported, with the way out.
    """
    if fix_file is not None:
        fixed_path(model, fix_file)
    subject = load_subject(
        model,
        parse_pairs(option or [], "--option"),
        input_shape=_shape(input_shape),
        input_dtype=input_dtype,
        vocabulary=vocabulary,
    )
    before = _examine(subject.model, subject, batch_size)
    after: Diagnosis | None = None
    changes: list[Change] = []
    written: Path | None = None
    if fix_file is not None and not before.ready:
        fixed, changes = fix(subject.model)
        if changes:
            after = _examine(fixed, subject, batch_size)
            written = write_fixed(model, changes, fix_file)
    final = after or before
    if json_output:
        document: dict[str, Any] = {"model": model, **before.to_json()}
        if fix_file is not None:
            document["fix"] = {
                "file": None if written is None else str(written),
                "changes": [change.to_json() for change in changes],
                "after": None if after is None else after.to_json(),
            }
        print_json(document)
    else:
        _print(subject, before)
        if fix_file is not None:
            _print_fix(before, after, changes, written)
        elif before.verdict is Verdict.READY_AFTER_FIX:
            again = f"the same command with --fix {_suggested(model)}"
            results.print(rows_of([("next", f"{again} writes the replacements")]))
    if not final.ready:
        raise typer.Exit(1)


def _examine(model: Any, subject: Subject, batch_size: int) -> Diagnosis:
    return diagnose(model, synthetic=subject.synthetic, batch_size=batch_size)


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ConfigurationError(
            f"--input-shape {text!r}", "write whole numbers, e.g. 3,32,32"
        ) from None


def _suggested(model: str) -> str:
    """A file name for the fixed model."""
    return f"{model.rpartition(':')[2]}_private.py"


# -- for people ------------------------------------------------------------------------


def _print(subject: Subject, found: Diagnosis) -> None:
    _print_verdict(found.verdict)
    weights = f"{found.trainable:,} trainable parameters"
    if found.frozen:
        weights += f", {found.frozen:,} frozen"
    results.print(
        rows_of(
            [
                ("model", f"{subject.name}: {weights}"),
                ("inputs", f"{subject.inputs}; synthetic values"),
            ]
        )
    )
    _print_problems(found.problems)
    _print_layers(found)
    if found.notes:
        results.print()
        results.print(rows_of([("note", text) for text in found.notes]))


def _print_verdict(verdict: Verdict, word: str = "verdict") -> None:
    results.print(f"[bold]{word}: [/][{_STYLES[verdict]}]{verdict.value}[/]")


def _print_problems(problems: Sequence[Problem]) -> None:
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for problem in problems:
        words = re.sub(r"'[^']*'|\d+", "", problem.problem)
        groups.setdefault((problem.error, words), []).append(problem)
    if groups:
        results.print("\nproblems", style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for number, (first, *others) in enumerate(groups.values(), 1):
        table.add_row(f"{number}.", escape(first.problem))
        if others:
            names = [n for p in others for n in p.names]
            table.add_row("", escape(f"likewise {_listed(names)}"))
        changes = [c for problem in (first, *others) for c in problem.changes]
        for words in dict.fromkeys(_without_name(change) for change in changes):
            table.add_row("", f"[green]--fix:[/] {escape(words)}")
        if first.advice and not first.changes:
            table.add_row("", f"-> {escape(first.advice)}")
    results.print(table)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SPELT_OUT])
    more = len(names) - _SPELT_OUT
    return f"{shown} and {more} more" if more > 0 else shown


def _without_name(change: Change) -> str:
    return f"{change.before} -> {change.after}"


def _print_layers(found: Diagnosis) -> None:
    fixed = any(problem.fixable for problem in found.problems)
    results.print("\nlayers after --fix" if fixed else "\nlayers", style="bold")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layer", overflow="fold")
    table.add_column("type", overflow="fold")
    table.add_column("in > out", overflow="fold")
    table.add_column("served by", overflow="fold")
    table.add_column("flops", min_width=6, justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for name, layer in _grouped(found.layers):
        cost = layer.cost
        table.add_row(
            escape(name),
            layer.kind,
            _arrow(layer),
            f"{layer.served_by}, {layer.norms}" if layer.norms else layer.served_by,
            "" if cost is None else _percent(ratio(cost.extra_flops, cost.base_flops)),
            "" if cost is None else _bytes(cost.extra_bytes),
            style="red" if layer.served_by == "refused" else "",
        )
    results.print(table)
    if found.cost is not None:
        cost = found.cost
        flops = _percent(ratio(cost.extra_flops, cost.base_flops))
        memory = _percent(ratio(cost.extra_bytes, cost.base_bytes))
        extra, base = _bytes(cost.extra_bytes), _bytes(cost.base_bytes)
        results.print(
            f"\nprivacy adds, at batch size {found.batch_size} (an estimate)",
            style="bold",
        )
        results.print(
            rows_of(
                [
                    ("flops", f"{flops} of forward and backward"),
                    ("memory", f"at most +{extra}, {memory} of {base}"),
                ]
            )
        )


def _grouped(layers: Sequence[LayerReport]) -> list[tuple[str, LayerReport]]:
    """Equal layers of repeated blocks in one row: ``blocks.*.norm (x6)``."""
    groups: dict[tuple[Any, ...], list[LayerReport]] = {}
    for x in layers:
        pattern = tuple("*" if n.isdigit() else n for n in x.name.split("."))
        key = (pattern, x.kind, x.inputs, x.outputs, x.served_by, x.norms)
        groups.setdefault((*key, x.parameters), []).append(x)
    return [(_shared_name([x.name for x in same]), same[0]) for same in groups.values()]


def _shared_name(names: Sequence[str]) -> str:
    """With a star for each number that is not the same in all of them."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".") for name in names), strict=True)
    parts = [c[0] if len(set(c)) == 1 else "*" for c in columns]
    return f"{'.'.join(parts)} (x{len(names)})"


def _arrow(layer: LayerReport) -> str:
    sides = dict.fromkeys(s for s in (layer.inputs, layer.outputs) if s is not None)
    return " > ".join("x".join(map(str, s)) or "1" for s in sides)


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"+{100 * value:.0f} %" if value >= 0.01 else "+<1 %"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}"


def _print_fix(
    before: Diagnosis,
    after: Diagnosis | None,
    changes: Sequence[Change],
    written: Path | None,
) -> None:
    if after is None or written is None:
        why = "has to be" if before.ready else "can be"
        tell(f"nothing {why} replaced, so no file is written", style="bold")
        return
    results.print()
    _print_verdict(after.verdict, "after the fix")
    groups: dict[str, list[str]] = {}
    for change in changes:
        remark = f" ({change.remark})" if change.remark else ""
        groups.setdefault(_without_name(change) + remark, []).append(change.name)
    results.print(
        rows_of([("changed", f"{w}: {_listed(n)}") for w, n in groups.items()])
    )
    remaining = [p for p in after.problems if not p.fixable]
    if remaining:
        _print_problems(remaining)
    results.print(
        rows_of([("written", f"{written}: use {written.stem}:factory from now on")])
    )
