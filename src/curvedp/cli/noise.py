"""``curvedp noise``: design correlated noise and see what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvedp.barrier import Relation
from curvedp.cli.output import print_json, reports_errors, results, rows_of, tell
from curvedp.cli.parameters import JsonFlag
from curvedp.data.files import brief
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments.noise import (
    DesignQuestion,
    DesignReport,
    design_noise,
    plot_design,
)
from curvedp.noise.strategies import Momentum, NoiseCurve, PrefixSums, Workload
from curvedp.storage import read_regular

__all__ = ["app"]

_MOST_DIGITS = 9
#: Bytes: some hundred thousand eigenvalues, of which a matrix is never asked more.
_LONGEST_SPECTRUM = 1 << 23

app = typer.Typer(
    help="Design correlated noise.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    pass


@app.command(
    epilog="Example: curvedp noise design --steps 2000 --sample-rate 0.01 --epsilon 5"
)
@reports_errors
def design(
    steps: Annotated[int, typer.Option(help="Steps of the run.")],
    bands: Annotated[
        str,
        typer.Option(
            help="Steps that the noise of one reaches; auto finds the best for "
            "--epsilon. Of blt, its buffers."
        ),
    ] = "auto",
    strategy: Annotated[
        str, typer.Option(help="banded (the best), toeplitz (quick) or blt.")
    ] = "banded",
    momentum: Annotated[
        float, typer.Option(help="Of the optimiser that the noise is designed for.")
    ] = 0.0,
    eigenvalues: Annotated[
        Path | None,
        typer.Option(
            help="Text file, one eigenvalue of the Hessian a line: design for the loss "
            "after the last step (NoiseCurve). With --learning-rate."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of gradient descent, with --eigenvalues.")
    ] = None,
    sample_rate: Annotated[
        float | None,
        typer.Option(help="Chance of an example to be in a step's batch."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Budget; calibrates sigma.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise / clip bound, in place of epsilon.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Of (epsilon, delta).")] = 1e-5,
    relation: Annotated[
        str, typer.Option(help="add-remove, zero-out or replace-one.")
    ] = "add-remove",
    separation: Annotated[
        int | None,
        typer.Option(
            help="blt: least steps between two participations of an example.",
            show_default="takes part once",
        ),
    ] = None,
    parameters: Annotated[
        int, typer.Option(help="Of the model, for the memory that noise takes.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture to this PNG file.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Design correlated noise: its error beside independent noise, and its cost.

    Nothing is read but the settings. Designs are cached for later runs.
    """
    question = DesignQuestion(
        kind=strategy,
        steps=steps,
        bands=_bands(bands),
        workload=_workload(momentum, eigenvalues, learning_rate),
        sample_rate=sample_rate,
        epsilon=epsilon,
        sigma=sigma,
        delta=delta,
        relation=Relation.parse(relation),
        separation=separation,
        parameters=parameters,
    )
    report = design_noise(question)
    if plot is not None:
        plot_design(report, plot)
    if json_output:
        print_json(report.to_json())
        return
    results.print(rows_of(_rows(report)))
    if plot is not None:
        tell(f"picture: {plot}")


def _bands(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise ConfigurationError(
            f"--bands is {text[:40]!r}", "give auto or a whole number from 1 on"
        )
    return int(text)


def _workload(
    momentum: float, eigenvalues: Path | None, learning_rate: float | None
) -> Workload:
    if (eigenvalues is None) != (learning_rate is None):
        raise ConfigurationError(
            "--eigenvalues and --learning-rate belong together",
            "NoiseCurve is for gradient descent on a known curvature",
        )
    if eigenvalues is None or learning_rate is None:
        return Momentum(momentum) if momentum else PrefixSums()
    if momentum:
        raise ConfigurationError(
            "NoiseCurve is for plain gradient descent", "leave out --momentum"
        )
    return NoiseCurve.of(_read_eigenvalues(eigenvalues), learning_rate)


def _read_eigenvalues(path: Path) -> list[float]:
    try:
        content = read_regular(path, most=_LONGEST_SPECTRUM)
        return [float(word) for word in content.decode("utf-8").split()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise DataError(
            f"{path} is not a list of eigenvalues: {reason}", "write one number a line"
        ) from error


def _rows(report: DesignReport) -> list[tuple[str, str]]:
    facts, question = report.to_json(), report.question
    rows = [
        ("strategy", f"{report.design.kind}, {report.design.bands} "
                     f"{'buffers' if report.design.kind == 'blt' else 'bands'}, "
                     f"{question.steps} steps, workload "
                     f"{question.workload.to_json()['kind']}"),
        ("error", f"{report.error:.4f} of independent noise of the same sigma"),
    ]  # fmt: skip
    if report.error_at_epsilon is not None:
        rows.append(
            ("at this epsilon", f"{report.error_at_epsilon:.4f} of independent noise "
                                f"(which needs sigma {report.plain_sigma:g})")
        )  # fmt: skip
    if report.sigma is not None:
        rows.append(("sigma", f"{report.sigma:g}"))
    if report.epsilon is not None:
        rows.append(
            ("epsilon", f"{report.epsilon:.4g} at delta {question.delta:g}, "
                        f"{question.relation.value}")
        )  # fmt: skip
    if "groups" in facts:
        rows.append(
            ("sampling", f"{facts['groups']} groups in turns, Poisson at rate "
                         f"{facts['group_rate']:.6g} in each; an example is in up to "
                         f"{facts['draws_of_an_example']} draws")
        )  # fmt: skip
    if "sensitivity" in facts:
        rows.append(
            ("sampling", "examples take turns in a fixed order, without amplification; "
                         f"sensitivity {facts['sensitivity']:.4g} x the clip bound")
        )  # fmt: skip
    memory = f"{report.strategy.memory} vectors of the model's size"
    if question.parameters:
        memory += f", {facts['bytes_remembered'] / 2**20:.1f} MiB"
    rows += [
        ("largest step", f"noise {facts['largest_step_noise']:.4g} x sigma x bound"),
        ("memory", memory),
        ("found", "in the cache" if report.cached else f"in {report.seconds:.1f} s"),
    ]
    return rows
