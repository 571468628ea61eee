"""``curvedp evaluate`` and ``curvedp predict``: use a trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from curvedp.cli.output import print_json, reports_errors, results, rows_of, tell
from curvedp.cli.parameters import (
    DeviceOption,
    JsonFlag,
    RepeatedModel,
    RunDirArgument,
)
from curvedp.errors import DataError
from curvedp.experiments import (
    NOT_PRIVATE,
    build_run,
    load_trained,
    predict_inputs,
    read_inputs,
)
from curvedp.experiments.predictions import check_output, to_text, write_predictions
from curvedp.experiments.runs import NO_HELD_OUT, evaluate_built
from curvedp.values import printable

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: curvedp evaluate RUN_DIR --metric accuracy,f1,auc")(
        evaluate
    )
    app.command(
        epilog="Example: curvedp predict RUN_DIR --input new.npz --output out.csv"
    )(predict)


@reports_errors
def evaluate(
    run_dir: RunDirArgument,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="accuracy, auc, f1, loss; repeatable.", show_default="as in training"
        ),
    ] = None,
    model: RepeatedModel = None,
    device: DeviceOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Compute metrics of a run's last checkpoint on its held-out split.

    Never on the private training examples: that would be a release.
    """
    trained = load_trained(run_dir, device=device, model=model)
    names = tuple(m for text in metric or () for m in text.split(","))
    config = replace(trained.config, metrics=names or trained.config.metrics)
    if device is not None:
        config = replace(config, device=device)
    built = build_run(config, to_train=False)
    if built.held_out is None:
        raise DataError(
            f"{built.source.name}: {NO_HELD_OUT}", "train with a test file declared"
        )
    values = evaluate_built(replace(built, model=trained.model))
    document = {
        "run_dir": str(run_dir),
        "recipe": config.recipe,
        "private": config.private,
        "step": trained.step,
        "metrics_computed_on": built.split,
        "metrics": values,
    }
    if not document["private"]:
        document["label"] = NOT_PRIVATE
    if json_output:
        print_json(document)
        return
    pairs = [("recipe", config.recipe)]
    if not document["private"]:
        pairs.append(("guarantee", NOT_PRIVATE))
    pairs += [("step", str(trained.step))]
    for name, value in values.items():
        shown = f"{value:.4f}" if name == "loss" else f"{100 * value:.2f} %"
        pairs.append((name, f"{shown} on the {built.split} split"))
    results.print(rows_of(pairs, loud=("guarantee",)))


@reports_errors
def predict(
    run_dir: RunDirArgument,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help=".npz with x, a table with the declared columns, or a folder.",
            show_default="the test split",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help=".csv, .jsonl or .json.", show_default="CSV on stdout"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.")
    ] = False,
    model: RepeatedModel = None,
    device: DeviceOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict with a run's last checkpoint."""
    if output is not None:
        check_output(output, overwrite=overwrite)
    trained = load_trained(run_dir, device=device, model=model)
    records = predict_inputs(trained, read_inputs(trained, source))
    if output is not None:
        write_predictions(output, records)
    document = {
        "run_dir": str(run_dir),
        "step": trained.step,
        "private": trained.config.private,
        "count": len(records),
        "output": None if output is None else str(output),
    }
    if not trained.config.private:
        document["label"] = NOT_PRIVATE
    if json_output:
        print_json(document if output else {**document, "predictions": records})
    elif output is None:
        text = to_text(records, ".csv")  # names of classes come from the run's folder
        typer.echo(printable(text) if results.is_terminal else text, nl=False)
    else:
        tell(f"{len(records)} predictions in {output}")
