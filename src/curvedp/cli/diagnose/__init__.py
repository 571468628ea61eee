"""``curvedp diagnose``: what curvature looks like, what it does to private steps."""

from __future__ import annotations

import typer

from curvedp.cli.diagnose import factors, hessian, steps

__all__ = ["app"]

app = typer.Typer(
    help="Look at the curvature that whitening relies on, and at what it gains.\n\n"
    "Sources of inputs are compared: **synthetic** noise, **white** noise, **public** "
    "data, and the **oracle**, the private data itself. Whatever looks at private data "
    "is research: it is marked NOT PRIVATE in plots, in JSON and here.",
    epilog="Start here: curvedp diagnose alignment --data digits --epsilon 3",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
factors.register(app)
steps.register(app)
hessian.register(app)
