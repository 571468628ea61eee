"""All commands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

from curvedp._version import __version__
from curvedp.cli import (
    audit,
    compare,
    diagnose,
    doctor,
    federated,
    inspect,
    noise,
    privacy,
    recipes,
    sweep,
    train,
)

__all__ = ["app"]

app = typer.Typer(
    name="curvedp",
    help="Differentially private training for PyTorch models.",
    epilog="Start here: curvedp train --data digits --epsilon 3",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvedp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


train.register(app)
compare.register(app)
sweep.register(app)
inspect.register(app)
recipes.register(app)
doctor.register(app)
audit.register(app)
app.add_typer(diagnose.app, name="diagnose")
app.add_typer(federated.app, name="federated")
app.add_typer(privacy.app, name="privacy")
app.add_typer(noise.app, name="noise")
