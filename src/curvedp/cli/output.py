"""Results go to stdout, everything else to stderr; errors are one message, exit 2."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Table

from curvedp.cli.parameters import DebugFlag, extend_signature
from curvedp.errors import CurvedpError, showing_private_text
from curvedp.experiments.jsonable import jsonable
from curvedp.train import Progress, Statement
from curvedp.values import printable

__all__ = [
    "bars",
    "log",
    "print_json",
    "print_statement",
    "reports_errors",
    "results",
    "rows_of",
    "tell",
    "training_bar",
]


class _Console(Console):
    """A terminal that text from elsewhere cannot command: names, notes, whole files."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


#: Where results are printed.
results = _Console(highlight=False, emoji=False)
#: Where everything else is printed.
log = _Console(stderr=True, highlight=False, emoji=False)

INTERRUPTED = 130
_LONGEST = 1500
#: Exit code of an error that nobody foresaw.
INTERNAL = 70


def print_json(document: Any) -> None:
    """One JSON document on stdout; a number that JSON lacks becomes a word."""
    sys.stdout.write(json.dumps(jsonable(document), indent=2, allow_nan=False) + "\n")


def tell(text: str, style: str = "") -> None:
    """A remark on stderr."""
    log.print(escape(_printable(text)), style=style, soft_wrap=True)


def rows_of(pairs: list[tuple[str, str]], loud: tuple[str, ...] = ()) -> Table:
    """Names and values under each other, wrapped at the width of the terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in pairs:
        name, text = printable(name), printable(text)  # or columns would not fit
        table.add_row(
            escape(name), escape(text), style="bold red" if name in loud else ""
        )
    return table


def print_statement(statement: Statement) -> None:
    """The privacy statement, wrapped."""
    safe = bool(statement.facts.get("private"))
    results.print(escape(statement.title), style="bold" if safe else "bold red")
    grid = rows_of(list(statement.lines), loud=("note",))
    results.print(grid)
    results.print("Not covered:", style="dim")
    results.print(rows_of([("  -", text) for text in statement.caveats]))


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are one message and exit code 2; adds ``--debug``."""

    @functools.wraps(command)
    def wrapped(*, debug: bool = False, **kwargs: Any) -> None:
        try:
            with showing_private_text(debug):
                command(**kwargs)
        except CurvedpError as error:
            if debug:
                _print_traceback()
            _print_error(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            tell("stopped")
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit:
            raise
        except MemoryError:
            if debug:
                _print_traceback()
            _print_error(CurvedpError(
                "the memory is used up",
                "use smaller data, a smaller model or --physical-batch-size; what was "
                "paid for is in the ledger, and a run that began can be resumed",
            ))  # fmt: skip
            raise typer.Exit(2) from None
        except Exception as error:
            if debug:
                _print_traceback()
            _print_error(_internal(error))
            raise typer.Exit(INTERNAL) from None

    return extend_signature(wrapped, command, {"debug": DebugFlag})


def _print_traceback() -> None:
    sys.stderr.write(printable(traceback.format_exc()))


def _internal(error: Exception) -> CurvedpError:
    """An error of ours: only its place, as its text may quote a private record."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return CurvedpError(
        f"an internal error: {type(error).__name__}{place}",
        "this is a mistake in curvedp; --debug shows all of it, but look through that "
        "before you share it: it may quote private data",
    )


def _print_error(error: CurvedpError) -> None:
    problem, advice = _printable(error.problem), _printable(error.advice)
    log.print(f"[bold red]error:[/] {escape(problem)}", soft_wrap=True)
    if advice:
        log.print(f"  -> {escape(advice)}", soft_wrap=True)


def _printable(text: str) -> str:
    """Without the codes by which a file's name could command the terminal, and cut."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return printable(text)


@contextmanager
def bars() -> Iterator[Bars]:
    """Progress bars on stderr."""
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[remark]}"),
        console=log,
        disable=not log.is_terminal,
    ) as shown:
        yield shown


@contextmanager
def training_bar(
    description: str, opening: str
) -> Iterator[Callable[[Progress], None]]:
    """A bar for one run, or a line for every tenth of it where there is no terminal.

    Args:
        description: stands before the bar.
        opening: said when the first step is made, and not if the run is refused.
    """
    with bars() as shown:
        task = shown.add_task(description, total=None, remark="")
        unsaid = [opening]

        def report(progress: Progress) -> None:
            if unsaid:
                tell(unsaid.pop(), style="dim")
            loss = progress.private_loss
            remark = "" if loss is None else f"PRIVATE loss {loss:.4g}"
            shown.update(
                task, completed=progress.step, total=progress.steps, remark=remark
            )
            if not log.is_terminal and _is_tenth(progress):
                tell(f"{description}: step {progress.step}/{progress.steps} {remark}")

        yield report


def _is_tenth(progress: Progress) -> bool:
    tenth = max(1, progress.steps // 10)
    return progress.step % tenth == 0 or progress.step == progress.steps
