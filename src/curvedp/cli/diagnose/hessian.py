"""``curvedp diagnose density``: the eigenvalues of the whole Hessian."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from curvedp.cli.diagnose.asked import Asked, takes_study_settings
from curvedp.cli.diagnose.findings import ORACLE, Findings, number, table
from curvedp.cli.options import takes_run_settings
from curvedp.cli.output import reports_errors
from curvedp.diagnostics.geometry import Density, hessian_density
from curvedp.diagnostics.geometry.plots import plot_densities

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "density",
        epilog="Example: curvedp diagnose density --data digits --epsilon 3 "
        "--lanczos-steps 60",
    )(density_command)


@reports_errors
@takes_run_settings
@takes_study_settings(at="0,100")
def density_command(
    asked: Asked,
    lanczos_steps: Annotated[
        int,
        typer.Option(
            help="Nodes of each quadrature; more resolve more.",
            rich_help_panel="Diagnosis",
        ),
    ] = 40,
    vectors: Annotated[
        int,
        typer.Option(
            help="Random vectors; the density is their mean.",
            rich_help_panel="Diagnosis",
        ),
    ] = 4,
) -> None:
    """Estimate the density of the Hessian's eigenvalues, by source.

    Stochastic Lanczos quadrature on Hessian-vector products of the mean loss; a cost of
    steps x vectors double backward passes for each source and each look.
    """
    run = asked.open()
    found: dict[tuple[int, str], Density] = {}

    def look(step: int) -> None:
        for name, source in run.sources.items():
            found[step, name] = hessian_density(
                run.study, source, steps=lanczos_steps, vectors=vectors
            )

    visited = asked.visit(run, look)
    needs = [ORACLE] if "oracle" in run.sources else []
    findings = Findings.of("density", asked, run, visited, needs)
    title = f"Eigenvalues of the Hessian of the loss: {run.title}"
    drawn = findings.draw(
        lambda p: plot_densities(found, p, title, findings.not_private)
    )
    rows = [
        {"step": step, "source": name,
         "private": run.sources[name].private and (visited.private or step == 0),
         **density.to_json()}
        for (step, name), density in found.items()
    ]  # fmt: skip
    facts = {"lanczos_steps": lanczos_steps, "vectors": vectors}
    findings.show({**facts, "rows": rows}, [_table(found)], drawn)


def _table(densities: dict[tuple[int, str], Density]) -> Table:
    made = table(
        "step", "source", "smallest", "largest", "mean", "rms", "negative part",
        title="eigenvalues of the Hessian",
    )  # fmt: skip
    for (step, name), density in densities.items():
        facts = density.to_json()
        values = (facts["smallest"], facts["largest"], facts["mean"])
        rms, share = facts["mean_square"] ** 0.5, 100 * facts["negative_part"]
        made.add_row(
            str(step), name, *map(number, values), number(rms), f"{share:.0f} %"
        )
    return made
