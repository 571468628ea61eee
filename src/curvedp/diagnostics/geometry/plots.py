"""The pictures of ``curvedp diagnose``. Each returns the file that it wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from curvedp.diagnostics.geometry.alignment import Alignment
from curvedp.diagnostics.geometry.canvas import Canvas, some_layers, style_of
from curvedp.diagnostics.geometry.clamping import LossPath
from curvedp.diagnostics.geometry.density import Density
from curvedp.diagnostics.geometry.isotropy import Isotropy
from curvedp.diagnostics.geometry.mean_field import EigenvalueRatio
from curvedp.diagnostics.geometry.snr import LayerSignal
from curvedp.diagnostics.geometry.spectra import LayerSpectrum

__all__ = [
    "plot_alignment",
    "plot_densities",
    "plot_losses",
    "plot_ratios",
    "plot_signals",
    "plot_spectra",
]

_FACTORS = {"A": "A, inputs", "G": "G, output gradients", "F": "F = A x G"}


def plot_spectra(
    spectra: Mapping[str, Sequence[LayerSpectrum]],
    path: Path,
    title: str,
    not_private: Sequence[str] = (),
) -> Path:
    """Sorted eigenvalues by source: a row for each layer, a column for each factor."""
    dense = [s.layer for found in spectra.values() for s in found if s.factor == "F"]
    layers = some_layers(dense)
    canvas = Canvas(max(1, len(layers)), 3)
    for source, found in spectra.items():
        by_place = {(s.layer, s.factor): s for s in found}
        for i, layer in enumerate(layers):
            for j, factor in enumerate(_FACTORS):
                s = by_place[layer, factor]
                kept = s.values > 0
                panel = canvas.axes[i][j]
                panel.loglog(
                    s.ranks[kept].tolist(),
                    s.values[kept].tolist(),
                    label=source,
                    **style_of(source).line(),
                )
                name = f"{_short(layer)}: {_FACTORS[factor]} ({s.size})"
                bottom = "rank" if i == len(layers) - 1 else ""
                canvas.name(panel, name, bottom, "" if j else "eigenvalue")
    return canvas.save(path, title, not_private)


def plot_ratios(
    scales: Mapping[str, Mapping[str, float]],
    ratios: Mapping[str, Mapping[str, EigenvalueRatio]],
    path: Path,
    title: str,
    not_private: Sequence[str],
) -> Path:
    """Mean-field theory's claims: scales by depth, spread of eigenvalue ratios.

    Args:
        scales: mean square of inputs, by source and layer.
        ratios: of A's eigenvalues, oracle over source, by source and layer.
        path: of the picture.
        title: first line of its title.
        not_private: what has no guarantee.
    """
    canvas = Canvas(1, 3, (3.6, 2.9))
    left, middle, right = canvas.axes[0]
    layers = list(next(iter(scales.values())))
    places = list(range(1, len(layers) + 1))
    for source, found in scales.items():
        values = [found[layer] for layer in layers]
        left.semilogy(places, values, label=source, **style_of(source).dots())
    for source, of_layer in ratios.items():
        style = style_of(source)
        alpha = [of_layer[layer].alpha for layer in layers]
        spread = [of_layer[layer].spread for layer in layers]
        middle.semilogy(places, alpha, label=source, **style.dots())
        right.semilogy(places, spread, label=source, **style.dots())
    for panel in (middle, right):
        panel.axhline(1, color="black", linewidth=0.8)
    depth = "dense layer, from the inputs on"
    canvas.name(left, "mean square of the layer's inputs", depth, "tr A / p")
    canvas.name(middle, "alpha: oracle's / source's eigenvalues of A", depth, "")
    canvas.name(right, "spread of these ratios (1: proportional)", depth, "")
    for panel in (left, middle, right):
        panel.set_xticks(_some(places))
    return canvas.save(path, title, not_private)


def plot_alignment(
    rows: Mapping[tuple[int, str], Sequence[Alignment]],
    path: Path,
    title: str,
    not_private: Sequence[str],
) -> Path:
    """Cosine and relative error through training, by layer and factor.

    Args:
        rows: by step and source.
        path: of the picture.
        title: first line of its title.
        not_private: what has no guarantee.
    """
    first = next(iter(rows.values()))
    layers = some_layers([r.layer for r in first if r.factor == "F"], most=4)
    canvas = Canvas(4, max(1, len(layers)), (2.7, 1.9))
    steps = sorted({step for step, _ in rows})
    sources = list(dict.fromkeys(source for _, source in rows))
    found = {
        (step, source, row.layer, row.factor): row
        for (step, source), of_step in rows.items()
        for row in of_step
    }
    for i, (factor, measure) in enumerate(
        [("A", "cosine"), ("A", "relative_error"),
         ("G", "cosine"), ("G", "relative_error")]
    ):  # fmt: skip
        for j, layer in enumerate(layers):
            panel = canvas.axes[i][j]
            for source in sources:
                at = [found[step, source, layer, factor] for step in steps]
                values = [getattr(row, measure) for row in at]
                panel.plot(steps, values, label=source, **style_of(source).dots())
            if measure == "cosine":
                panel.set_ylim(-0.03, 1.05)
            else:
                panel.set_yscale("log")
            panel.set_xticks(_some(steps))
            words = {"cosine": "cosine", "relative_error": "relative error"}[measure]
            name = _short(layer) if i == 0 else ""
            canvas.name(
                panel, name, "step" if i == 3 else "", "" if j else f"{factor}: {words}"
            )
    return canvas.save(path, title, not_private)


def plot_signals(
    signals: Mapping[int, Mapping[str, Sequence[LayerSignal]]],
    isotropies: Mapping[int, Mapping[str, Mapping[str, Isotropy]]],
    path: Path,
    title: str,
    not_private: Sequence[str],
) -> Path:
    """Signal to noise and isotropy of every layer, by whitening; a row for each step.

    Args:
        signals: by step and map.
        isotropies: by step, map and layer.
        path: of the picture.
        title: first line of its title.
        not_private: what has no guarantee.
    """
    canvas = Canvas(len(signals), 2, (5.2, 3.1))
    for i, (step, by_map) in enumerate(signals.items()):
        left, right = canvas.axes[i]
        layers = [row.layer for row in next(iter(by_map.values()))]
        places = range(len(layers))
        for name, rows in by_map.items():
            style = style_of(name).dots()
            left.semilogy(places, [row.ratio for row in rows], label=name, **style)
            round_ = isotropies[step][name]
            ratios = [round_[layer].ratio for layer in layers]
            right.semilogy(places, ratios, label=name, **style)
        names = [_short(layer) for layer in layers]
        tilted = {"rotation": 40, "ha": "right"} if max(map(len, names)) > 4 else {}
        for panel in (left, right):
            panel.set_xticks(places, names, **tilted)
        canvas.name(left, f"step {step}: signal to noise", "layer", "signal / noise")
        canvas.name(
            right, f"step {step}: isotropy (1: a sphere)", "layer", "eff. dim. / dim."
        )
    return canvas.save(path, title, not_private)


def plot_densities(
    densities: Mapping[tuple[int, str], Density],
    path: Path,
    title: str,
    not_private: Sequence[str] = (),
) -> Path:
    """Density and sorted magnitudes of the Hessian's eigenvalues; a row for each step.

    Args:
        densities: by step and source.
        path: of the picture.
        title: first line of its title.
        not_private: what has no guarantee.
    """
    steps = sorted({step for step, _ in densities})
    canvas = Canvas(len(steps), 2, (4.6, 2.9))
    for i, step in enumerate(steps):
        left, right = canvas.axes[i]
        here = {s: d for (at, s), d in densities.items() if at == step}
        low = min(float(d.nodes[0]) for d in here.values())
        high = max(float(d.nodes[-1]) for d in here.values())
        width = max(high - low, 1e-12) / 100
        points = torch.linspace(low - 5 * width, high + 5 * width, 600)
        size = next(iter(here.values())).size
        most, least = 0.0, math.inf
        for source, density in here.items():
            line = style_of(source).line()
            values = density.at(points.double(), width)
            most = max(most, float(values.max()))
            left.semilogy(points.tolist(), values.tolist(), label=source, **line)
            magnitudes, ranks = density.ranked()
            right.loglog(
                [1.0, *ranks.clamp_min(1).tolist()],
                [float(magnitudes[0]), *magnitudes.tolist()],
                label=source,
                **line,
            )
            least = min(least, float(magnitudes[-1]))
        largest = max(abs(low), abs(high))
        right.set_ylim(max(least / 3, 1e-7 * largest), 3 * largest)
        # less than a hundredth of one eigenvalue is nothing to see
        nothing = 0.01 / size / width / math.sqrt(2 * math.pi)
        left.set_ylim(nothing, 3 * most)
        canvas.name(left, f"step {step}: density", "eigenvalue", "density")
        canvas.name(right, f"step {step}: decay", "rank", "magnitude of eigenvalue")
    return canvas.save(path, title, not_private)


def plot_losses(
    paths: Mapping[str, LossPath], path: Path, title: str, not_private: Sequence[str]
) -> Path:
    """The training loss of several runs; a cross where one has diverged."""
    canvas = Canvas(1, 1, (6.8, 3.8))
    panel = canvas.axes[0][0]
    for place, (name, found) in enumerate(paths.items()):
        style = style_of(name, place)
        panel.semilogy(found.steps, found.losses, label=name, **style.line())
        if found.diverged_at is not None:
            end = found.steps[-1], found.losses[-1]
            panel.plot(*end, marker="X", markersize=10, color=style.colour)
            panel.annotate(
                f"diverged at step {found.diverged_at}",
                end,
                xytext=(9, -3),
                textcoords="offset points",
                fontsize=9,
                color=style.colour,
            )
    canvas.name(panel, "", "step", "training loss")
    return canvas.save(path, title, not_private)


def _short(layer: str) -> str:
    """A parameter's name as its layer's, from the right if it is long."""
    name = layer.removesuffix(".weight")
    return name if len(name) <= 22 else f"...{name[-20:]}"


def _some(places: Sequence[int], most: int = 8) -> list[int]:
    step = max(1, math.ceil(len(places) / most))
    return list(places)[::step]
