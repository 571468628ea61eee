"""The comparison as a picture. Only released or held-out quantities are drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError, missing_extra
from curvedp.experiments.compare import Comparison
from curvedp.storage import write_atomically

__all__ = ["plot_comparison", "plot_rounds"]

_PRIVATE, _REFERENCE = "#2b6cb0", "#8a9099"
_INK, _WARNING = "#1f2933", "#b42318"


def plot_comparison(comparison: Comparison, path: Path, *, data: str = "") -> Path:
    """Draw every recipe's mean with its spread and its single runs.

    Raises:
        ConfigurationError: matplotlib is not installed.
        StorageError: the picture cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    metric, rows = comparison.metric, comparison.rows
    share = metric != "loss"
    scale = 100.0 if share else 1.0
    figure = Figure(
        figsize=(max(5.2, 1.5 * len(rows) + 2.4), 4.2), layout="constrained"
    )
    axes = figure.add_subplot()
    finite: list[float] = []
    for place, row in enumerate(rows):
        values = [scale * r.metrics[metric] for r in comparison.runs[row["recipe"]]]
        finite += [v for v in values if math.isfinite(v)]
        _draw_recipe(axes, place, row, values, scale)
    lows = finite or [0.0]
    axes.set_xticks(range(len(rows)), [_tick(row) for row in rows], color=_INK)
    for tick, row in zip(axes.get_xticklabels(), rows, strict=True):
        tick.set_color(_INK if row["private"] else _WARNING)
    unit = " (%)" if share else ""
    axes.set_ylabel(f"{metric} on the {comparison.split} split{unit}", color=_INK)
    axes.set_xlabel("recipe", color=_INK)
    if share:
        bottom = max(0.0, min(95.0, min(lows) - 0.5 * (100.0 - min(lows))))
        axes.set_ylim(bottom, 100.0 + 0.08 * (100.0 - bottom))
        axes.set_yticks([t for t in axes.get_yticks() if t <= 100])
    else:
        axes.set_ylim(0.0, 1.2 * max(lows) or 1.0)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.yaxis.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.suptitle(_title(comparison, data), fontsize=11, color=_INK)
    suffix = path.suffix.lstrip(".") or "png"
    write_atomically(path, lambda p: figure.savefig(p, dpi=150, format=suffix))
    return path


def plot_rounds(rows: list[dict[str, float]], path: Path, *, title: str = "") -> Path:
    """Accuracy on held-out records by round.

    Raises:
        ConfigurationError: matplotlib is not installed, or there are no metrics.
        StorageError: the picture cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
    if not rows or "accuracy" not in rows[0]:
        raise ConfigurationError(
            "there is no accuracy to draw", "evaluate on data with a test part"
        )
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [r["round"] for r in rows],
        [100 * r["accuracy"] for r in rows],
        color=_PRIVATE,
        linewidth=1.8,
    )
    axes.set_xlabel("round", color=_INK)
    axes.set_ylabel("accuracy on the test split (%)", color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.yaxis.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=11, color=_INK)
    suffix = path.suffix.lstrip(".") or "png"
    write_atomically(path, lambda p: figure.savefig(p, dpi=150, format=suffix))
    return path


def _draw_recipe(
    axes: Any, place: int, row: dict[str, Any], values: list[float], scale: float
) -> None:
    metric = row["metric"]
    mean, spread = scale * row[f"{metric}_mean"], scale * row[f"{metric}_std"]
    colour = _PRIVATE if row["private"] else _REFERENCE
    if not math.isfinite(mean):
        where = ("data", "axes fraction")
        axes.annotate("diverged", (place, 0.04), xycoords=where, ha="center")
        return
    # points, not bars: the axis need not begin at zero to show a difference honestly
    axes.errorbar(
        place,
        mean,
        yerr=spread if len(values) > 1 else None,
        color=colour,
        marker="o" if row["private"] else "s",
        markersize=11,
        capsize=8,
        linewidth=2.2,
        zorder=4,
    )
    if len(values) > 1:
        offsets = [place + 0.18] * len(values)
        axes.scatter(
            offsets,
            values,
            s=16,
            color="white",
            edgecolor=colour,
            linewidth=0.8,
            zorder=5,
        )
    text = f"{mean:.1f}" if scale != 1.0 else f"{mean:.3g}"
    label = f"{text} ± {spread:.1f}" if len(values) > 1 and scale != 1.0 else text
    axes.annotate(
        label,
        (place, mean),
        xytext=(-14, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=10,
        color=_INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


def _tick(row: dict[str, Any]) -> str:
    if not row["private"]:
        return f"{row['recipe']}\n{row['label']}"
    return f"{row['recipe']}\nε = {row['epsilon']:.3g}"


def _title(comparison: Comparison, data: str) -> str:
    private = [row for row in comparison.rows if row["epsilon"] is not None]
    seeds = comparison.rows[0]["seeds"]
    runs = f"{seeds} run{'s' if seeds > 1 else ''} each"
    first = f"{data + ': ' if data else ''}{comparison.metric}, mean ± std of {runs}"
    if not private:
        return f"{first}\nno privacy guarantee"
    row = private[0]
    return (
        f"{first}\n(ε = {row['epsilon']:.3g}, δ = {row['delta']:g}), {row['relation']}"
    )
