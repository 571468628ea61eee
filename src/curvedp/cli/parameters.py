"""The parameters that commands share, and how they are put into a signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

__all__ = [
    "DebugFlag",
    "DeviceOption",
    "DryRunFlag",
    "JsonFlag",
    "RepeatedModel",
    "RunDirArgument",
    "RunDirOption",
    "extend_signature",
]

DebugFlag = Annotated[
    bool,
    typer.Option("--debug", help="Show all of an error. It may quote private records."),
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.")
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and its cost; train nothing.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda or mps.", show_default="auto")
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the run; never an existing one.",
        show_default="runs/<data>-<recipe>-<time>",
    ),
]
RepeatedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Repeats the folder's module:factory: it is imported only then.",
        show_default=False,
    ),
]
RunDirArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]


def extend_signature(
    wrapper: Callable[..., None],
    command: Callable[..., None],
    more: Mapping[str, Any],
    *,
    drop: tuple[str, ...] = (),
) -> Callable[..., None]:
    """Give a wrapper the options of its command and some more, for typer to read.

    Args:
        wrapper: takes the options of ``more`` and passes the rest on.
        command: the wrapped function.
        more: annotations of additional options; their default is None, False for flags.
        drop: parameters of ``command`` that the wrapper fills in.
    """
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    parameters = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in own
        if p.name not in drop
    ]
    for name, annotation in more.items():
        is_flag = annotation.__origin__ is bool
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if is_flag else None,
                annotation=annotation,
            )
        )
    extended: Any = wrapper
    del extended.__wrapped__  # its annotations are names in another module
    extended.__signature__ = inspect.Signature(parameters)
    extended.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
