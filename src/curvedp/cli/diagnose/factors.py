"""``curvedp diagnose spectra`` and ``alignment``: factors from different sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from curvedp.cli.diagnose.asked import Asked, takes_study_settings
from curvedp.cli.diagnose.findings import ORACLE, Findings, number, table
from curvedp.cli.options import takes_run_settings
from curvedp.cli.output import reports_errors
from curvedp.diagnostics.geometry import (
    Alignment,
    EigenvalueRatio,
    LayerSpectrum,
    alignment,
    eigenvalue_ratio,
    identity_factors,
    input_scales,
    layer_spectra,
)
from curvedp.diagnostics.geometry.plots import (
    plot_alignment,
    plot_ratios,
    plot_spectra,
)

__all__ = ["register"]

_Spectra = dict[str, list[LayerSpectrum]]
_Ratios = dict[str, dict[str, EigenvalueRatio]]
_Scales = dict[str, dict[str, float]]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        "spectra",
        epilog="Example: curvedp diagnose spectra --data digits --epsilon 3 --at 0,100",
    )(spectra_command)
    app.command(
        "alignment",
        epilog="Example: curvedp diagnose alignment --data digits --epsilon 3",
    )(alignment_command)


@reports_errors
@takes_run_settings
@takes_study_settings(at="0")
def spectra_command(asked: Asked) -> None:
    """Draw the eigenvalues of A, G and F = A x G of every layer, by source.

    With the oracle also: are eigenvalues proportional to the oracle's (alpha and the
    spread of the ratios), and how large are inputs, layer by layer?
    """
    run = asked.open()
    spectra: dict[int, _Spectra] = {}
    scales: dict[int, _Scales] = {}

    def look(step: int) -> None:
        factors = {n: run.study.factors(s) for n, s in run.sources.items()}
        spectra[step] = {n: layer_spectra(f) for n, f in factors.items()}
        scales[step] = {n: input_scales(f) for n, f in factors.items()}

    visited = asked.visit(run, look)
    needs = [ORACLE] if "oracle" in run.sources else []
    found = Findings.of("spectra", asked, run, visited, needs)
    rows: list[dict[str, Any]] = []
    ratio_rows: list[dict[str, Any]] = []
    shown: list[Table | str] = []
    drawn: list[Path] = []
    for step, here in spectra.items():
        ratios = _ratios(here)
        suffix = "" if len(spectra) == 1 else f"-{step}"
        words = f"step {step}: {run.title}"
        drawn += _draw(found, here, scales[step], ratios, suffix, words)
        shown.append(_spectra_table(step, here))
        if ratios:
            shown.append(_ratio_table(step, ratios))
        for name, of_source in here.items():
            private = run.sources[name].private and (visited.private or step == 0)
            marks = {"step": step, "source": name, "private": private}
            rows += [{**marks, **s.to_json()} for s in of_source]
        for name, by_layer in ratios.items():
            marks = {"step": step, "source": name, "private": False, "factor": "A"}
            ratio_rows += [
                {**marks, "layer": layer, "input_scale": scales[step][name][layer],
                 "oracle_input_scale": scales[step]["oracle"][layer], **r.to_json()}
                for layer, r in by_layer.items()
            ]  # fmt: skip
    found.show({"rows": rows, "ratios": ratio_rows}, shown, drawn)


def _draw(
    found: Findings,
    spectra: _Spectra,
    scales: _Scales,
    ratios: _Ratios,
    suffix: str,
    words: str,
) -> list[Path]:
    reasons = found.not_private
    title = f"Eigenvalues of curvature factors, {words}"
    drawn = found.draw(lambda p: plot_spectra(spectra, p, title, reasons), suffix)
    if ratios:
        asks = f"Are spectra proportional to the oracle's? {words}"
        drawn += found.draw(
            lambda p: plot_ratios(scales, ratios, p, asks, reasons), f"-ratios{suffix}"
        )
    return drawn


def _ratios(spectra: _Spectra) -> _Ratios:
    """Of A's eigenvalues, oracle over source, by source and dense layer."""
    if "oracle" not in spectra:
        return {}
    by_layer = {
        name: {s.layer: s.values for s in found if s.factor == "A"}
        for name, found in spectra.items()
    }
    oracle = by_layer.pop("oracle")
    return {
        name: {layer: eigenvalue_ratio(oracle[layer], v) for layer, v in found.items()}
        for name, found in by_layer.items()
    }


def _spectra_table(step: int, spectra: _Spectra) -> Table:
    made = table(
        "layer", "factor", "size", *spectra,
        title=f"step {step}: directions that carry the trace, (sum l)^2 / sum l^2",
    )  # fmt: skip
    first = next(iter(spectra.values()))
    for place, spectrum in enumerate(first):
        if spectrum.factor == "F":
            continue
        cells = [number(found[place].participation()) for found in spectra.values()]
        made.add_row(spectrum.layer, spectrum.factor, str(spectrum.size), *cells)
    return made


def _ratio_table(step: int, ratios: _Ratios) -> Table:
    made = table(
        "layer", "factor", *ratios,
        title=f"step {step}: oracle's eigenvalues / source's, mean x/ spread "
        "(1: proportional)",
    )  # fmt: skip
    for layer in next(iter(ratios.values())):
        found = [by_layer[layer] for by_layer in ratios.values()]
        cells = [f"{number(r.alpha)} x/ {number(r.spread)}" for r in found]
        made.add_row(layer, "A", *cells)
    return made


@reports_errors
@takes_run_settings
@takes_study_settings(at="0,25,50,100")
def alignment_command(asked: Asked) -> None:
    """Compare factors with the oracle's through training: direction and scale.

    Cosine <O, C> / (|O| |C|), relative error |O - C| / |O| and the same at equal trace,
    for A, G and F = A x G of every layer. The identity is what plain DP-SGD assumes.
    """
    run = asked.open("oracle")
    rows: dict[tuple[int, str], list[Alignment]] = {}

    def look(step: int) -> None:
        oracle = run.study.factors(run.sources["oracle"])
        rows[step, "identity"] = alignment(identity_factors(oracle), oracle)
        for name, source in run.sources.items():
            if name != "oracle":
                rows[step, name] = alignment(run.study.factors(source), oracle)

    visited = asked.visit(run, look)
    found = Findings.of("alignment", asked, run, visited, [ORACLE])
    title = f"Factors against the oracle's through training: {run.title}"
    drawn = found.draw(lambda p: plot_alignment(rows, p, title, found.not_private))
    document = [
        {"step": step, "source": source, "private": False, **row.to_json()}
        for (step, source), of_step in rows.items()
        for row in of_step
    ]
    found.show({"rows": document}, [_alignment_table(rows)], drawn)


def _alignment_table(rows: dict[tuple[int, str], list[Alignment]]) -> Table:
    steps = sorted({step for step, _ in rows})
    sources = list(dict.fromkeys(source for _, source in rows))
    made = table(
        "layer", "factor", *sources,
        title="cosine with the oracle, steps "
        + ", ".join(map(str, steps)),
    )  # fmt: skip
    for place, first in enumerate(rows[steps[0], sources[0]]):
        if first.factor == "F":
            continue
        cells = []
        for source in sources:
            path = [rows[step, source][place] for step in steps]
            cells.append(" ".join(f"{row.cosine:.2f}" for row in path))
        made.add_row(first.layer, first.factor, *cells)
    return made
